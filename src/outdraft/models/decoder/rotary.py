"""Angles of rotary positions, and their frequencies.

Su et al. 2021, in the layout of Hugging Face checkpoints: dimension i of a head is rotated together
with dimension i + C / 2. Frequencies may be stretched to contexts longer than the trained one:
linear (Chen et al. 2023), yarn (Peng et al. 2023), and the rule of Llama 3.1.

Dimension key: M positions, C head size, F = C / 2 frequencies.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outdraft.models.decoder.config import RopeConfig, RopeKind


class Rotary(nn.Module):
    """The table of cos and sin for all positions: [M, C], cos of all frequencies, then sin.

    Attributes:
        order_C: which dimension of the checkpoint each of ours is; None: the same.
    """

    cos_sin_MC: Tensor

    def __init__(
        self,
        config: RopeConfig,
        head_size: int,
        max_positions: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        table_dtype = torch.promote_types(dtype, torch.float32)
        positions_M = torch.arange(max_positions, dtype=table_dtype)
        angles_MF = positions_M[:, None] * frequencies(config, head_size).to(table_dtype)
        factor, width = attention_factor(config), head_size // 2
        cos_sin_MC = torch.cat(
            (
                _widened(angles_MF.cos() * factor, width, 1.0),
                _widened(angles_MF.sin() * factor, width, 0.0),
            ),
            dim=-1,
        )
        self.register_buffer("cos_sin_MC", cos_sin_MC.to(device), persistent=False)
        self.order_C = rotary_order(config, head_size)


def rotary_order(config: RopeConfig, head_size: int) -> Tensor | None:
    """int64 [C]: which dimension of the checkpoint each of ours is; None: the same.

    Queries and keys that are put in this order have the same products.
    """
    rotary_size = config.rotary_size(head_size)
    if rotary_size == head_size:
        return None
    low, high = torch.arange(rotary_size).chunk(2)
    rest_low, rest_high = torch.arange(rotary_size, head_size).chunk(2)
    return torch.cat((low, rest_low, high, rest_high))


def frequencies(config: RopeConfig, head_size: int) -> Tensor:
    """float32 [F], radians a position, of the rotated dimensions.

    float32 as in training: far positions feel the rounding.
    """
    rotary_size = config.rotary_size(head_size)
    exponents_F = torch.arange(0, rotary_size, 2, dtype=torch.float32) / rotary_size
    plain_F = 1.0 / config.theta**exponents_F
    match config.kind:
        case RopeKind.PLAIN:
            return plain_F
        case RopeKind.LINEAR:
            return plain_F / config.factor
        case RopeKind.DYNAMIC:
            return 1.0 / _dynamic_theta(config, rotary_size) ** exponents_F
        case RopeKind.LLAMA3:
            return _llama3(plain_F, config)
        case RopeKind.LONGROPE:
            is_long = config.context_len > config.original_max_len
            factors = config.long_factor if is_long else config.short_factor
            return 1.0 / (torch.tensor(factors) * config.theta**exponents_F)
        case RopeKind.YARN:
            return _yarn(plain_F, config)


def attention_factor(config: RopeConfig) -> float:
    """The factor of cos and sin."""
    if config.kind not in (RopeKind.YARN, RopeKind.LONGROPE):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.factor <= 1:
        return 1.0
    if config.kind is RopeKind.LONGROPE:
        return math.sqrt(1 + math.log(config.factor) / math.log(config.original_max_len))
    return 0.1 * math.log(config.factor) + 1.0


def _widened(table_MF: Tensor, width: int, value: float) -> Tensor:
    """The table, and columns of that value to the right of its own."""
    return F.pad(table_MF, (0, width - table_MF.shape[1]), value=value)


def _dynamic_theta(config: RopeConfig, rotary_size: int) -> float:
    """The base with which the slowest frequency spans the context as it spanned the trained one."""
    stretch = max(config.context_len, config.original_max_len) / config.original_max_len
    base = config.factor * stretch - (config.factor - 1)
    return config.theta * base ** (rotary_size / (rotary_size - 2))


def _llama3(plain_F: Tensor, config: RopeConfig) -> Tensor:
    """Keep the fast frequencies, divide the slow ones, blend between the two."""
    turns_F = config.original_max_len * plain_F / (2 * math.pi)  # over the trained context
    span = config.high_freq_factor - config.low_freq_factor
    kept_F = ((turns_F - config.low_freq_factor) / span).clamp(0, 1)
    return plain_F * kept_F + plain_F / config.factor * (1 - kept_F)


def _yarn(plain_F: Tensor, config: RopeConfig) -> Tensor:
    """Keep frequencies that turn more than beta_fast times over the trained context, divide those
    that turn less than beta_slow times, blend by dimension between the two."""
    num_frequencies = len(plain_F)

    def dimension_of(turns: float) -> float:
        trained = config.original_max_len / (turns * 2 * math.pi)
        return num_frequencies * math.log(trained) / math.log(config.theta)

    first, last = dimension_of(config.beta_fast), dimension_of(config.beta_slow)
    if config.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * num_frequencies - 1)
    width = last - first or 0.001
    divided_F = ((torch.arange(num_frequencies) - first) / width).clamp(0, 1)
    return plain_F * (1 - divided_F) + plain_F / config.factor * divided_F
