"""What the slow twins of several networks have in common."""

import torch
from torch import Tensor


def turn(vector: Tensor, position: int, theta: float) -> Tensor:
    """The rotary embedding of one head's vector."""
    half = len(vector) // 2
    exponents = torch.arange(half, dtype=torch.float32) / half
    angles = position * (1.0 / theta**exponents).to(vector.dtype)
    low, high = vector[:half], vector[half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([low * cos - high * sin, high * cos + low * sin])


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight."""
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
