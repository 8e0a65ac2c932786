"""Rotary frequencies of a transformers model, fixed for one longest text.

The library lets two kinds of rotary embedding change with the longest text of a batch. Keys in the
cache would then not fit those of later rows, and a text would depend on those beside it. Here they
follow from the longest text that the engine reads, as those of the other models do.
"""

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_MOVING = ("dynamic", "longrope")
_FIXED = "fixed"  # no kind of the library: nothing is updated


def fix_frequencies(model: nn.Module, context_len: int) -> bool:
    """Set the frequencies for texts of up to so many tokens; whether there are such."""
    found = False
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str) and rope_type in _MOVING:
            _fix(module, rope_type, None, context_len)
            module.rope_type = _FIXED  # pyright: ignore[reportArgumentType]
            found = True
        elif isinstance(rope_type, dict):
            for layer_type, kind in rope_type.items():
                if kind in _MOVING:
                    _fix(module, kind, layer_type, context_len)
                    rope_type[layer_type] = _FIXED
                    found = True
    return found


def _fix(module: nn.Module, kind: str, layer_type: str | None, context_len: int) -> None:
    options = {} if layer_type is None else {"layer_type": layer_type}
    prefix = "" if layer_type is None else f"{layer_type}_"
    own = getattr(module, f"{prefix}inv_freq")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, own.device, seq_len=context_len, **options
    )
    own.copy_(frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
