"""What a draft head reads from the target: residual streams, the last hidden state, distributions.

Dimension key: B sequences, L tokens in each, D the target's hidden size, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM

# Residual streams after so many layers, before any norm: the first, the last and one between.
TAPPED_LAYERS = (1, 3, 4)


@dataclass(frozen=True)
class TargetStates:
    """One forward of the target over ids_BL; the place i of each tensor has read tokens 0..i."""

    taps: Tensor  # [B, L, 3 * D], the tapped streams side by side, lowest first
    hidden: Tensor  # [B, L, D], behind the final norm: what the target's own head reads
    logits: Tensor  # [B, L, V]
    embedding: Tensor  # [V, D], the target's input embeddings
    lm_head: Tensor  # [V, D], the target's output matrix


def _keep(taps: dict[int, Tensor], layer: int) -> Callable[..., None]:
    def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        taps[layer] = output

    return hook


@torch.no_grad()
def target_states(target: LlamaForCausalLM, ids_BL: Tensor) -> TargetStates:
    taps: dict[int, Tensor] = {}
    hooks = [
        target.model.layers[layer - 1].register_forward_hook(_keep(taps, layer))
        for layer in TAPPED_LAYERS
    ]
    try:
        hidden = target.model(ids_BL, use_cache=False).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return TargetStates(
        torch.cat([taps[layer] for layer in TAPPED_LAYERS], dim=-1),
        hidden,
        target.lm_head(hidden),
        target.model.embed_tokens.weight,
        target.lm_head.weight,
    )
