"""Experts that are stored as 4-bit floats in groups of 32 with a power of two each: MXFP4.

The format is that of the Open Compute Project's "OCP Microscaling Formats (MX) Specification" 1.0
(2023). The layout is that of GPT-OSS: `..._blocks` uint8 [X, E, N, 16], the first number of two in
the low half of a byte, and `..._scales` uint8 [X, E, N], exponents with a bias of 127.

Twice a number is whole, from -12 to 12: such codes, with half of the scale, fit tiles of 8 bits.

Dimension key: X experts, D inputs, E outputs, N groups of inputs.
"""

from functools import partial

import torch

from outdraft.core.errors import ConfigError
from outdraft.core.weight_format import WeightFormat
from outdraft.models.checkpoints.stored import GroupedCodes, StoredStack, StoredWeight
from outdraft.models.checkpoints.tensors import StoredTensors

_GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"
# e2m1: a sign, two bits of exponent, one of mantissa; times 2.
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_NOT_A_NUMBER = 255  # as an exponent


def mxfp4_stacks(tensors: StoredTensors) -> dict[str, StoredStack]:
    """By the names of the parameters, which have inputs before outputs.

    Raises:
        ConfigError: tensors are missing, or do not fit each other.
    """
    names = [name.removesuffix(_BLOCKS) for name in tensors if name.endswith(_BLOCKS)]
    return {name: _stack(tensors, name) for name in names}


def parts_of(name: str) -> tuple[str, str]:
    """The names of the tensors that a parameter is made of."""
    return name + _BLOCKS, name + _SCALES


def _stack(tensors: StoredTensors, name: str) -> StoredStack:
    blocks, scales = parts_of(name)
    shape = tensors.shape(blocks)
    if len(shape) != 4 or shape[3] != _GROUP // 2 or tensors.shape(scales) != shape[:3]:
        raise ConfigError(
            f"tensors {blocks!r} and {scales!r} have shapes {shape} and {tensors.shape(scales)}, "
            f"but MXFP4 has [X, E, N, {_GROUP // 2}] and [X, E, N]"
        )
    num_experts, num_outputs, num_groups, _ = shape
    weights = [
        StoredWeight(
            shape=(num_outputs, num_groups * _GROUP),
            label=f"MXFP4, 4-bit floats, a scale for {_GROUP} inputs",
            group_inputs=_GROUP,
            tile=WeightFormat.INT8_G32,
            scale_bytes=2,
            read=partial(_read, tensors, name, index),
        )
        for index in range(num_experts)
    ]
    return StoredStack(weights, is_turned=True)


def _read(tensors: StoredTensors, name: str, index: int) -> GroupedCodes:
    blocks, scales = parts_of(name)
    bytes_ENB = tensors.read_at(blocks, index)
    exponents_EN = tensors.read_at(scales, index)
    if (exponents_EN == _NOT_A_NUMBER).any():
        raise ConfigError(f"tensor {scales!r} has scales that are not numbers")
    # 16 pairs of numbers: a byte is looked up as a whole.
    twice = torch.tensor(_TWICE, dtype=torch.int8)
    pairs = torch.stack((twice.repeat(16), twice.repeat_interleave(16)), dim=-1)
    codes_ED = pairs[bytes_ENB.flatten(1).int()].flatten(1)
    scales_EN = torch.ldexp(torch.ones(exponents_EN.shape), exponents_EN.int() - 128)
    return GroupedCodes(8, _GROUP, codes_ED, scales_EN)
