"""Layers for multi-token prediction on whole texts, without a cache.

The slow twin of models/drafters/eagle.py and library_mtp.py. Tensors have the names of the
published files.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.arithmetic import norm, turn


@dataclass(frozen=True)
class Settings:
    """What config.json says of a MiMo layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    theta: float
    eps: float


def mimo_states(
    own: dict[str, Tensor], settings: Settings, embedding: Tensor, ids: Tensor, inputs: Tensor
) -> Tensor:
    """[T, D]: behind the layer's last norm, of rows that read the tokens and the states before them
    at positions 0, 1, ... The names are without `model.mtp_layers.0.`."""
    embedded = embedding[ids].clone()
    embedded[0] = 0
    states = norm(inputs, own["hidden_layernorm.weight"], settings.eps)
    tokens = norm(embedded, own["token_layernorm.weight"], settings.eps)
    hidden = torch.cat([states, tokens], dim=1) @ own["input_proj.weight"].T
    x = norm(hidden, own["input_layernorm.weight"], settings.eps)
    hidden = hidden + _attend(own, settings, x)
    x = norm(hidden, own["post_attention_layernorm.weight"], settings.eps)
    gate, up = x @ own["mlp.gate_proj.weight"].T, x @ own["mlp.up_proj.weight"].T
    hidden = hidden + (gate / (1 + (-gate).exp()) * up) @ own["mlp.down_proj.weight"].T
    return norm(hidden, own["final_layernorm.weight"], settings.eps)


def deepseek_states(
    own: dict[str, Tensor],
    eps: float,
    layer: Callable[[Tensor], Tensor],
    embedding: Tensor,
    ids: Tensor,
    inputs: Tensor,
) -> Tensor:
    """The same in the layout of DeepSeek-V3 and GLM-4.5; `layer` is the decoder layer inside. The
    names are without `model.layers.L.`."""
    tokens = norm(embedding[ids], own["enorm.weight"], eps)
    states = norm(inputs, own["hnorm.weight"], eps)
    hidden = layer(torch.cat([tokens, states], dim=1) @ own["eh_proj.weight"].T)
    return norm(hidden, own["shared_head.norm.weight"], eps)


def _attend(own: dict[str, Tensor], settings: Settings, x: Tensor) -> Tensor:
    num_rows, size = len(x), settings.head_size
    q, k, v = (
        (x @ own[f"self_attn.{name}_proj.weight"].T + own[f"self_attn.{name}_proj.bias"]).view(
            num_rows, -1, size
        )
        for name in "qkv"
    )
    out = torch.zeros(num_rows, settings.num_heads, size, dtype=x.dtype)
    for row in range(num_rows):
        for head in range(settings.num_heads):
            kv = head * settings.num_kv_heads // settings.num_heads
            turned = turn(q[row, head], row, settings.theta)
            scores = [
                turned @ turn(k[place, kv], place, settings.theta) for place in range(row + 1)
            ]
            shares = (torch.stack(scores) * size**-0.5).softmax(0)
            out[row, head] = shares @ v[: row + 1, kv]
    return out.flatten(1) @ own["self_attn.o_proj.weight"].T
