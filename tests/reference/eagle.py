"""EAGLE drafters on whole sequences, without a cache: the slow twin of models/drafters/eagle.py.

A drafter is a dict of tensors by the names of EAGLE's repository (layers.0 for the midlayer) and
the few settings that its names do not tell. What a checkpoint leaves out stands in the dict as the
target's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """What config.json says; biases, further layers and most norms show in the tensors."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    theta: float
    eps: float
    vocab_size: int
    norm_output: bool = False
    norm_before_residual: bool = False


def features(weights: dict[str, Tensor], settings: Settings, tapped: list[Tensor]) -> Tensor:
    """EAGLE-3: [T, D] of K times [T, S]."""
    wide = torch.cat(tapped, dim=1)
    if "input_norm.weight" in weights:
        wide = _norm(wide, weights["input_norm.weight"], settings.eps)
    size = tapped[0].shape[1]
    for tap in range(len(tapped)):
        if f"fc_norm.{tap}.weight" in weights:
            part = wide[:, tap * size : (tap + 1) * size].clone()
            wide[:, tap * size : (tap + 1) * size] = _norm(
                part, weights[f"fc_norm.{tap}.weight"], settings.eps
            )
    return _linear(weights, "fc", wide)


def states(
    weights: dict[str, Tensor], settings: Settings, token_ids: Tensor, inputs: Tensor
) -> Tensor:
    """[T, D]: the state of each row of a sequence that reads `inputs` [T, F] at positions 0..."""
    embedded = weights["embed_tokens.weight"][token_ids]
    if "layers.0.hidden_norm.weight" in weights:
        hidden = _norm(inputs, weights["layers.0.hidden_norm.weight"], settings.eps)
        token = _norm(embedded, weights["layers.0.input_layernorm.weight"], settings.eps)
        read = torch.cat([token, hidden], dim=1)
        residual = hidden if settings.norm_before_residual else inputs
    else:
        if "embedding_layernorm.weight" in weights:
            embedded = _norm(embedded, weights["embedding_layernorm.weight"], settings.eps)
        residual = _linear(weights, "fc", torch.cat([embedded, inputs], dim=1))
        read = residual
        if "layers.0.input_layernorm.weight" in weights:
            read = _norm(read, weights["layers.0.input_layernorm.weight"], settings.eps)
    layer = 0
    while f"layers.{layer}.mlp.up_proj.weight" in weights:
        name = f"layers.{layer}"
        if layer > 0:
            read = _norm(residual, weights[f"{name}.input_layernorm.weight"], settings.eps)
        residual = residual + _attention(weights, settings, f"{name}.self_attn", read)
        read = _norm(residual, weights[f"{name}.post_attention_layernorm.weight"], settings.eps)
        gate = torch.nn.functional.silu(_linear(weights, f"{name}.mlp.gate_proj", read))
        up = _linear(weights, f"{name}.mlp.up_proj", read)
        residual = residual + _linear(weights, f"{name}.mlp.down_proj", gate * up)
        layer += 1
    if settings.norm_output:
        return _norm(residual, weights["norm.weight"], settings.eps)
    return residual


def logits(weights: dict[str, Tensor], settings: Settings, hidden: Tensor) -> Tensor:
    """[T, V]: -inf for tokens that the drafter does not have."""
    if not settings.norm_output:
        for name in ("norm.weight", "pre_lm_head_layernorm.weight"):
            if name in weights:
                hidden = _norm(hidden, weights[name], settings.eps)
    drafted = hidden @ weights["lm_head.weight"].T
    if "d2t" not in weights:
        return drafted
    wide = torch.full((len(hidden), settings.vocab_size), -torch.inf, dtype=hidden.dtype)
    for draft, offset in enumerate(weights["d2t"].tolist()):
        wide[:, draft + offset] = drafted[:, draft]
    return wide


def _attention(weights: dict[str, Tensor], settings: Settings, name: str, read: Tensor) -> Tensor:
    num_rows, size = len(read), settings.head_size
    queries = _linear(weights, f"{name}.q_proj", read).reshape(num_rows, -1, size)
    keys = _linear(weights, f"{name}.k_proj", read).reshape(num_rows, -1, size)
    values = _linear(weights, f"{name}.v_proj", read).reshape(num_rows, -1, size)
    if f"{name}.q_norm.weight" in weights:
        queries = _norm(queries, weights[f"{name}.q_norm.weight"], settings.eps)
        keys = _norm(keys, weights[f"{name}.k_norm.weight"], settings.eps)
    group = settings.num_heads // settings.num_kv_heads
    heads = []
    for head in range(settings.num_heads):
        query = _turned(queries[:, head], settings.theta)
        key = _turned(keys[:, head // group], settings.theta)
        scores = query @ key.T / size**0.5
        later = torch.ones(num_rows, num_rows, dtype=torch.bool).triu(1)
        chances = scores.masked_fill(later, -torch.inf).softmax(dim=1)
        heads.append(chances @ values[:, head // group])
    return _linear(weights, f"{name}.o_proj", torch.cat(heads, dim=1))


def _turned(x: Tensor, theta: float) -> Tensor:
    """Row p turned to position p: x[i] + j x[i + half] is one complex number."""
    half = x.shape[1] // 2
    # The frequencies are float32 numbers by definition, as in training.
    rates = (1.0 / theta ** (torch.arange(half, dtype=torch.float32) * 2 / x.shape[1])).double()
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), rates)
    turned = torch.complex(x[:, :half], x[:, half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=1)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _linear(weights: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    result = x @ weights[f"{name}.weight"].T
    bias = weights.get(f"{name}.bias")
    return result if bias is None else result + bias
