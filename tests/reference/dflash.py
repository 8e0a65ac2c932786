"""DFlash and DSpark on whole texts, without a cache: the slow twin of models/drafters/dflash.py.

A drafter is a dict of tensors by the names of its authors' files, and the few settings that the
names do not tell.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tests.reference.arithmetic import norm, turn


@dataclass(frozen=True)
class Settings:
    """`windows` and `is_causal` are of each layer."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    theta: float
    eps: float
    block_size: int
    mask_token: int
    windows: tuple[int | None, ...]
    is_causal: tuple[bool, ...]


def block_states(
    weights: dict[str, Tensor], settings: Settings, tapped: list[Tensor], newest: int
) -> Tensor:
    """[R, D]: of a block behind a text, whose target's streams are K times [T, S]. The newest token
    has none: it is the text's token at place T."""
    streams = torch.cat(tapped, dim=1) @ weights["fc.weight"].T
    streams = norm(streams, weights["hidden_norm.weight"], settings.eps)
    ids = [newest] + [settings.mask_token] * (settings.block_size - 1)
    hidden = weights["embed_tokens.weight"][torch.tensor(ids)]
    for layer in range(len(settings.windows)):
        own = {
            name.removeprefix(f"layers.{layer}."): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        hidden = hidden + _attend(own, settings, layer, streams, hidden)
        x = norm(hidden, own["post_attention_layernorm.weight"], settings.eps)
        gate, up = x @ own["mlp.gate_proj.weight"].T, x @ own["mlp.up_proj.weight"].T
        hidden = hidden + (gate / (1 + (-gate).exp()) * up) @ own["mlp.down_proj.weight"].T
    return norm(hidden, weights["norm.weight"], settings.eps)


def pair_logits(weights: dict[str, Tensor], token: int) -> Tensor:
    """[N]: what DSpark adds to the logits of the draft behind a token."""
    embedded = weights["markov_head.markov_w1.weight"][token]
    return weights["markov_head.markov_w2.weight"] @ embedded


def confidence(weights: dict[str, Tensor], state: Tensor, token: int) -> float:
    """The log-odds of a draft, from its row's state and the token before it."""
    read = torch.cat([state, weights["markov_head.markov_w1.weight"][token]])
    score = weights["confidence_head.proj.weight"][0] @ read
    return float(score + weights["confidence_head.proj.bias"][0])


def _attend(
    own: dict[str, Tensor], settings: Settings, layer: int, streams: Tensor, hidden: Tensor
) -> Tensor:
    num_text, num_rows = len(streams), len(hidden)
    x = norm(hidden, own["input_layernorm.weight"], settings.eps)
    both = torch.cat([streams, x])
    heads, kv_heads, size = settings.num_heads, settings.num_kv_heads, settings.head_size
    q = (x @ own["self_attn.q_proj.weight"].T).view(num_rows, heads, size)
    k = (both @ own["self_attn.k_proj.weight"].T).view(len(both), kv_heads, size)
    v = (both @ own["self_attn.v_proj.weight"].T).view(len(both), kv_heads, size)
    q = norm(q, own["self_attn.q_norm.weight"], settings.eps)
    k = norm(k, own["self_attn.k_norm.weight"], settings.eps)
    out = torch.zeros(num_rows, heads * size, dtype=hidden.dtype)
    for row in range(num_rows):
        for head in range(heads):
            seen = [
                place
                for place in range(len(both))
                if _sees(settings, layer, num_text + row, place, num_text)
            ]
            turned = turn(q[row, head], num_text + row, settings.theta)
            kv = head * kv_heads // heads
            scores = [turned @ turn(k[place, kv], place, settings.theta) for place in seen]
            shares = (torch.stack(scores) * size**-0.5).softmax(0)
            values = torch.stack([v[place, kv] for place in seen])
            out[row, head * size : (head + 1) * size] = shares @ values
    return out @ own["self_attn.o_proj.weight"].T


def _sees(settings: Settings, layer: int, position: int, place: int, num_text: int) -> bool:
    window = settings.windows[layer]
    if window is not None and abs(position - place) >= window:
        return False
    return place < num_text or place <= position or not settings.is_causal[layer]
