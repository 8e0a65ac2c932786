"""What of a transformers model reads texts: the rest, such as towers for pictures, takes no memory.

Many families are published with parts for pictures or sound. Texts do not meet them.
"""

from collections.abc import Generator, Set
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or the part of it that is a whole language model, head included."""
    kinds: Any = tuple(MODEL_FOR_CAUSAL_LM_MAPPING.values())
    whole: list[Any] = [part for part in model.children() if isinstance(part, kinds)]
    return whole[0] if len(whole) == 1 else model


@contextmanager
def reached_modules() -> Generator[set[nn.Module]]:
    """Those that compute anything inside."""
    reached = set[nn.Module]()
    hook = register_module_forward_pre_hook(lambda module, _: reached.add(module))
    try:
        yield reached
    finally:
        hook.remove()


def leave_out_unreached(model: PreTrainedModel, reached: Set[nn.Module]) -> list[str]:
    """Drop the large parts that a text does not reach; returns their names.

    Looked at are the parts of the model and those of the network before its head: inside a layer
    it depends on the text what is reached, as of experts.
    """
    dropped = list[str]()
    networks = [part for part in model.children() if isinstance(part, PreTrainedModel)]
    for parent in (model, *networks):
        for name, part in list(parent.named_children()):
            has_weights = next(part.parameters(), None) is not None
            if has_weights and reached.isdisjoint(part.modules()):
                setattr(parent, name, None)
                dropped.append(name)
    return dropped


def leave_out_beside_the_text(model: PreTrainedModel) -> None:
    """Drop what most likely no text reaches, as far as configurations tell; no pass is made.

    These are the parts that lie beside a network of the text's kind and hold none.
    """
    text, head = type(model.config.get_text_config()), model.get_output_embeddings()
    reads_text = {
        part
        for part in model.modules()
        if part is head or (isinstance(part, PreTrainedModel) and type(part.config) is text)
    }
    for network in list(model.modules()):
        if not isinstance(network, PreTrainedModel) or type(network.config) is text:
            continue
        if reads_text.isdisjoint(network.modules()):
            continue
        for name, part in list(network.named_children()):
            if reads_text.isdisjoint(part.modules()):
                setattr(network, name, None)
