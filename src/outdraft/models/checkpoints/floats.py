"""Weights that are stored as floats of 8 or 4 bits with scales.

FP8 and compressed-tensors have 8-bit floats (e4m3). A scale is for the whole weight, for an output,
or for a block such as 128 x 128 (DeepSeek-AI 2024).

MXFP4 has experts of 4-bit floats in groups of 32 with a power of two each (Open Compute Project
2023, "OCP Microscaling Formats (MX) Specification" 1.0). The layout is that of GPT-OSS:
`..._blocks` uint8 [X, E, N, 16], the first number of two in the low half of a byte, and
`..._scales` uint8 [X, E, N], exponents with a bias of 127. Twice a number is whole, from -12 to 12:
such codes, with half of the scale, fit tiles of 8 bits.

Dimension key: X experts, D inputs, E outputs, N groups of inputs; R rows, C columns of an expert.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import CodedWeight
from outdraft.models.checkpoints.files import StoredTensors
from outdraft.models.checkpoints.quantization import WeightScheme
from outdraft.models.checkpoints.stored import StoredParameter, StoredWeight

FLOAT8 = "F8_E4M3"
_NO_TILES = "there are no tiles of 8-bit floats"
_ENDS = ("_scale", "_scale_inv")
_GROUP = 32
_BLOCKS, _SCALES = "_blocks", "_scales"
# e2m1: a sign, two bits of exponent, one of mantissa; times 2.
_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
_NOT_A_NUMBER = 255  # as an exponent


def float_weight(tensors: StoredTensors, module: str, scheme: WeightScheme) -> StoredWeight:
    """The weight of a module.

    Raises:
        ConfigError: tensors are missing, or do not fit each other.
    """
    name = f"{module}.weight"
    num_outputs, num_inputs = tensors.shape(name)
    if (dtype := tensors.dtype(name)) != FLOAT8:
        raise ConfigError(f"tensor {name!r} has dtype {dtype}, but its scheme asks for {FLOAT8}")
    scales = [f"{module}.weight_scale_inv", f"{module}.weight_scale"]
    scale_name = scales[0] if scales[0] in tensors else scales[1]
    shape = tensors.shape(scale_name)
    block = scheme.block or (1, num_inputs)
    blocks = [-(-num_outputs // block[0]), -(-num_inputs // block[1])]
    is_one = shape in ([], [1], [1, 1])
    if scheme.block is None and shape == [num_outputs]:
        shape = [num_outputs, 1]
    if not (shape == blocks or (scheme.block is None and is_one)):
        raise ConfigError(
            f"tensor {scale_name!r} has shape {shape}, but a weight of shape "
            f"{[num_outputs, num_inputs]} needs {blocks}"
        )
    kind = "weight" if is_one else "output"
    kind = f"{block[0]} x {block[1]} numbers" if scheme.block else kind
    return StoredWeight(
        shape=(num_outputs, num_inputs),
        label=f"{scheme.storage}, 8-bit floats, a scale for each {kind}",
        group_inputs=num_inputs,
        reason=_NO_TILES,
        read=lambda: _scaled(tensors.read(name), tensors.read(scale_name), block),
    )


def _scaled(numbers_RC: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [R, C]: the numbers times one scale, or the scales of rows or of blocks."""
    numbers_RC, scales = numbers_RC.float(), scales.float()
    scales = scales if scales.dim() == 2 else scales.reshape(-1, 1)
    num_rows, num_columns = numbers_RC.shape
    if scales.shape[1] not in (1, num_columns):
        scales = scales.repeat_interleave(block[1], dim=1)[:, :num_columns]
    if scales.shape[0] in (1, num_rows):
        return numbers_RC.mul_(scales)
    for rows_RC, scales_C in zip(numbers_RC.split(block[0]), scales, strict=True):
        rows_RC.mul_(scales_C)  # no copy of all scales for every number
    return numbers_RC


def float_stacks(
    tensors: StoredTensors, scheme: WeightScheme
) -> Iterator[tuple[str, tuple[str, str], StoredParameter]]:
    """Experts that are one parameter [X, R, C]: its name, those of its tensors, and its numbers.

    Scales are [X], or have one number for all rows, for a row, or for a block of rows; likewise for
    columns.

    Raises:
        ConfigError: tensors do not fit each other.
    """
    for name in tensors:
        scales = next((name + end for end in _ENDS if name + end in tensors), None)
        if scales is None or tensors.dtype(name) != FLOAT8 or len(tensors.shape(name)) != 3:
            continue
        num_experts, *shape = tensors.shape(name)
        found = tensors.shape(scales)
        sizes = found[1:] or [1, 1]
        fits = len(sizes) == 2 and found[0] == num_experts
        if not fits or any(
            part not in (1, size, -(-size // block))
            for part, size, block in zip(sizes, shape, scheme.block or (1, 1), strict=True)
        ):
            raise ConfigError(
                f"tensor {scales!r} has shape {found}, which does not fit {[num_experts, *shape]}"
            )
        weights = [
            StoredWeight(
                shape=(shape[0], shape[1]),
                label=f"{scheme.storage}, 8-bit floats of experts",
                group_inputs=shape[1],
                reason=_NO_TILES,
                read=partial(_read_expert, tensors, name, scales, scheme.block or (1, 1), index),
            )
            for index in range(num_experts)
        ]
        yield name, (name, scales), StoredParameter([[one] for one in weights], is_stack=True)


def _read_expert(
    tensors: StoredTensors, name: str, scales: str, block: tuple[int, int], index: int
) -> Tensor:
    """[R, C]: of one expert."""
    return _scaled(tensors.read_part(name, index), tensors.read_part(scales, index), block)


def mxfp4_stacks(tensors: StoredTensors) -> Iterator[tuple[str, tuple[str, str], StoredParameter]]:
    """Experts in MXFP4, likewise; they have inputs before outputs.

    Raises:
        ConfigError: tensors are missing, or do not fit each other.
    """
    for first in tensors:
        if first.endswith(_BLOCKS):
            name = first.removesuffix(_BLOCKS)
            yield name, (first, name + _SCALES), _mxfp4_stack(tensors, name)


def _mxfp4_stack(tensors: StoredTensors, name: str) -> StoredParameter:
    blocks, scales = name + _BLOCKS, name + _SCALES
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
            read=partial(_read_mxfp4, tensors, name, index),
        )
        for index in range(num_experts)
    ]
    return StoredParameter([[one] for one in weights], is_stack=True, is_transposed=True)


def _read_mxfp4(tensors: StoredTensors, name: str, index: int) -> CodedWeight:
    blocks, scales = name + _BLOCKS, name + _SCALES
    bytes_ENB = tensors.read_part(blocks, index)
    exponents_EN = tensors.read_part(scales, index)
    if (exponents_EN == _NOT_A_NUMBER).any():
        raise ConfigError(f"tensor {scales!r} has scales that are not numbers")
    # 16 pairs of numbers: a byte is looked up as a whole.
    twice = torch.tensor(_TWICE, dtype=torch.int8)
    pairs = torch.stack((twice.repeat(16), twice.repeat_interleave(16)), dim=-1)
    codes_ED = pairs[bytes_ENB.flatten(1).int()].flatten(1)
    scales_EN = torch.ldexp(torch.ones(exponents_EN.shape), exponents_EN.int() - 128)
    return CodedWeight(WeightFormat.INT8_G32, codes_ED, scales_EN)
