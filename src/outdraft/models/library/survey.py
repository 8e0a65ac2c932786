"""Passes over two rows that find out what a transformers model does with them.

The engine may give a model rows of any texts in any order. That is right only if rows meet in
attention alone, and if each follows from its position, not from its place among the rows. The
library's code need not say so: it can take positions and ignore them. So it is tried.

Many families are published with parts for pictures or sound. Texts do not meet them: they are left
out, and take no memory.

Dimension key: N all numbers of one row.
"""

import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outdraft.core.errors import ConfigError
from outdraft.models.library.operations import Survey, computed_by

_WINDOW_MASK = "create_sliding_window_causal_mask"  # what makes the library's masks of windows
# What the library's code raises where it cannot do what it is asked for.
FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def survey_attention(
    model: PreTrainedModel, config: PretrainedConfig, mask: Tensor | None
) -> Survey:
    """The attention of the layers.

    Args:
        mask: to give to the library, so that it makes none.

    Raises:
        ConfigError: the model cannot run on this engine.
    """
    survey, rows_2N = _pass(model, [0, 1], mask)
    text_config = config.get_text_config()
    count = text_config.num_hidden_layers
    if len(survey.forms) != count:
        raise ConfigError(
            f"{type(model).__name__} attends in {len(survey.forms)} of its {count} layers in a way "
            "that can be replaced: it cannot run on this engine"
        )
    _, swapped_2N = _pass(model, [1, 0], mask)
    error_2 = (swapped_2N.flip(0) - rows_2N).norm(dim=1)
    tolerance = 2e-2 if model.dtype.itemsize < 4 else 1e-3
    if (error_2 > tolerance * rows_2N.norm(dim=1)).any():
        raise ConfigError(
            f"{type(model).__name__} cannot read rows at given positions: they depend on their "
            "order, or on each other outside of attention"
        )
    add_windows(survey, text_config, {type(part) for part in (model, *survey.forms)})
    return survey


def check_packed(model: PreTrainedModel, mask: Tensor | None) -> None:
    """Try a pass once weights are packed: some code reads them outside of products.

    Raises:
        ConfigError: it does so.
    """
    _pass(model, [0, 1], mask, "cannot run once its weights are packed")


def _pass(
    model: PreTrainedModel,
    order: list[int],
    mask: Tensor | None,
    failure: str = "cannot read rows at given positions",
) -> tuple[Survey, Tensor]:
    """The tokens 0 and 1 at these positions: layers, and what they and the head computed [2, N].

    Raises:
        ConfigError: the model fails; `failure` says what it cannot do.
    """
    survey = Survey()
    rows_12 = torch.tensor([order], device=model.device)
    try:
        with torch.inference_mode(), computed_by(survey):
            out = model(
                input_ids=rows_12, position_ids=rows_12, attention_mask=mask, use_cache=False
            )
    except (ConfigError, torch.OutOfMemoryError):
        raise
    except FAILURES as error:
        raise ConfigError(f"{type(model).__name__} {failure}: {error}") from error
    return survey, torch.cat([*survey.seen_2N, out.logits[0].double()], dim=1)


def add_windows(survey: Survey, config: PretrainedConfig, kinds: Iterable[type]) -> None:
    """Add what the library says by its masks only: chunks, and windows of some families.

    Args:
        kinds: the classes of the model and of its attention; the part for texts may have another
            family's code. Where none of them makes masks of windows, config.json may name a window
            that nothing reads.

    Raises:
        ConfigError: the masks and the attention do not agree.
    """
    says_masks = any(hasattr(sys.modules[kind.__module__], _WINDOW_MASK) for kind in kinds)
    types, window = getattr(config, "layer_types", None), getattr(config, "sliding_window", None)
    for index, (module, form) in enumerate(survey.forms.items()):
        kind = types[index] if types is not None else "sliding_attention" if says_masks else ""
        masked = window if kind == "sliding_attention" else None
        chunk = config.attention_chunk_size if kind == "chunked_attention" else None
        if form.window is not None and form.window != masked:
            raise ConfigError(
                f"layer {index} attends over a window of {form.window} tokens, but the family's "
                f"masks say {masked}"
            )
        survey.forms[module] = replace(form, window=masked, chunk=chunk)


def text_part(model: PreTrainedModel) -> PreTrainedModel:
    """The model, or the part of it that is a whole language model, head included."""
    kinds: Any = tuple(MODEL_FOR_CAUSAL_LM_MAPPING.values())
    whole: list[Any] = [part for part in model.children() if isinstance(part, kinds)]
    return whole[0] if len(whole) == 1 else model


def leave_out_beside_the_text(model: PreTrainedModel) -> list[str]:
    """Drop parts that no text reaches, by their configurations; returns their names.

    These are the siblings of a network of the text's kind that hold none.
    """
    dropped, text = list[str](), type(model.config.get_text_config())
    head = model.get_output_embeddings()
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
                dropped.append(name)
    return dropped
