"""Weights of compressed-tensors, GPTQ and AWQ that are stored as integers.

All come down to w = scale * (code + shift). Sources of the layouts: compressed-tensors' compressors
pack_quantized and naive_quantized; AutoGPTQ's and GPTQModel's QuantLinear (Frantar et al. 2022);
AutoAWQ's WQLinear_GEMM (Lin et al. 2023).

Dimension key: D inputs, E outputs, N groups of inputs.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import CodedWeight, decoded, regrouped
from outdraft.models.checkpoints.files import StoredTensors
from outdraft.models.checkpoints.quantization import Storage, WeightScheme
from outdraft.models.checkpoints.stored import StoredWeight, tile_for

# Where AWQ puts output j of eight: the bits from 4 * _AWQ_PLACES[j] of a word.
_AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]

Fields = Callable[[], Tensor]  # [E, D]
Scales = Callable[[], tuple[Tensor, Tensor | None]]  # [E, N], and zero points


def integer_weight(tensors: StoredTensors, module: str, scheme: WeightScheme) -> StoredWeight:
    """The weight of a module.

    Raises:
        ConfigError: tensors are missing, or do not fit each other.
    """
    shape, scales_name, fields_of, scales_of = _LAYOUTS[scheme.storage](tensors, module, scheme)
    num_inputs, middle = shape[1], _middle(scheme.bits)
    group_inputs = scheme.group_inputs or num_inputs
    order_D = _order(tensors, module, group_inputs)
    scales_EN, zeros_EN = scales_of()
    _check(module, shape, group_inputs, scales_EN, zeros_EN, is_whole=order_D is None)
    # Symmetric checkpoints may store zero points that are all in the middle.
    has_zero = zeros_EN is not None and bool((zeros_EN != middle).any())
    found = tile_for(scheme.bits, group_inputs, num_inputs, has_zero=has_zero)
    if order_D is not None:
        found = "its groups take inputs in an order of their own (desc_act)"
    tile = found if isinstance(found, WeightFormat) else None
    size = "all inputs" if scheme.group_inputs is None else f"{group_inputs} inputs"

    def read() -> CodedWeight | Tensor:
        fields_ED, (scales_EN, zeros_EN) = fields_of(), scales_of()
        codes_ED = (fields_ED.to(torch.int16) - middle).to(torch.int8)
        scales_EN = scales_EN.float().expand(len(codes_ED), -1)
        shifts_EN = middle - zeros_EN.float() if has_zero and zeros_EN is not None else None
        if tile is not None:
            sizes = group_inputs, num_inputs, tile.group_inputs or num_inputs
            shifts_EN = None if shifts_EN is None else regrouped(shifts_EN, *sizes)
            return CodedWeight(tile, codes_ED, regrouped(scales_EN, *sizes), shifts_EN)
        if order_D is None:
            return decoded(codes_ED, scales_EN, shifts_EN, group_inputs)
        shifts_ED = 0 if shifts_EN is None else shifts_EN[:, order_D]
        return (codes_ED.float() + shifts_ED) * scales_EN[:, order_D]

    return StoredWeight(
        shape=shape,
        label=f"{scheme.storage}, {scheme.bits} bits, a scale for {size}",
        group_inputs=group_inputs,
        tile=tile,
        reason="" if tile else str(found),
        scale_bytes=2 if tensors.dtype(scales_name) in ("BF16", "F16") else 4,
        read=read,
    )


def _middle(bits: int) -> int:
    """The field of zero where there are no zero points."""
    return 1 << (bits - 1)


def fields(words_XW: Tensor, bits: int) -> Tensor:
    """uint8 [X, ...]: 4 or 8 bits each, the lowest bits of a word first."""
    bytes_XB = words_XW.contiguous().view(torch.uint8)
    if bits == 8:
        return bytes_XB
    return torch.stack((bytes_XB & 15, bytes_XB >> 4), dim=-1).flatten(-2)


Layout = tuple[tuple[int, int], str, Fields, Scales]  # shape, the name of the scales


def _packed(tensors: StoredTensors, module: str, scheme: WeightScheme) -> Layout:
    rows, columns = (int(size) for size in tensors.read(f"{module}.weight_shape"))
    names = [f"{module}.weight_{part}" for part in ("packed", "scale", "zero_point")]

    def fields_of() -> Tensor:
        return fields(tensors.read(names[0]), scheme.bits)[:, :columns]

    def scales_of() -> tuple[Tensor, Tensor | None]:
        zeros_EN = None
        if scheme.has_zero and tensors.dtype(names[2]) == "I8":  # older releases did not pack them
            zeros_EN = tensors.read(names[2]).to(torch.int16) + _middle(scheme.bits)
        elif scheme.has_zero:
            zeros_EN = fields(tensors.read(names[2]).T, scheme.bits).T[:rows]
        return _at_least_2d(tensors.read(names[1])), zeros_EN

    return (rows, columns), names[1], fields_of, scales_of


def _plain_integers(tensors: StoredTensors, module: str, scheme: WeightScheme) -> Layout:
    rows, columns = tensors.shape(f"{module}.weight")
    names = [f"{module}.weight", f"{module}.weight_scale", f"{module}.weight_zero_point"]

    def fields_of() -> Tensor:
        return tensors.read(names[0]).to(torch.int16) + _middle(8)

    def scales_of() -> tuple[Tensor, Tensor | None]:
        zeros_EN = None
        if scheme.has_zero:
            zeros_EN = _at_least_2d(tensors.read(names[2])).to(torch.int16) + _middle(8)
        return _at_least_2d(tensors.read(names[1])), zeros_EN

    return (rows, columns), names[1], fields_of, scales_of


def _gptq_or_awq(tensors: StoredTensors, module: str, scheme: WeightScheme) -> Layout:
    """GPTQ puts inputs into a word, AWQ outputs; both put zero points of outputs."""
    names = [f"{module}.{part}" for part in ("qweight", "scales", "qzeros")]
    is_awq, bits = scheme.storage is Storage.AWQ, scheme.bits
    num_inputs, num_outputs = tensors.shape(names[0])
    if is_awq:
        num_outputs = num_outputs * 32 // bits
    else:
        num_inputs = num_inputs * 32 // bits

    def by_outputs(name: str) -> Tensor:
        numbers = fields(tensors.read(name), bits)[:, :num_outputs]
        return numbers.unflatten(-1, (-1, 8))[..., _AWQ_PLACES].flatten(-2) if is_awq else numbers

    def fields_of() -> Tensor:
        if is_awq:
            return by_outputs(names[0]).T.contiguous()
        return fields(tensors.read(names[0]).T, bits)

    def scales_of() -> tuple[Tensor, Tensor | None]:
        # Zero less one is all ones.
        zeros_NE = by_outputs(names[2]).to(torch.int16) + int(scheme.adds_one)
        return tensors.read(names[1]).T, (zeros_NE & ((1 << bits) - 1)).T

    return (num_outputs, num_inputs), names[1], fields_of, scales_of


_LAYOUTS: dict[Storage, Callable[[StoredTensors, str, WeightScheme], Layout]] = {
    Storage.PACKED: _packed,
    Storage.INTEGERS: _plain_integers,
    Storage.GPTQ: _gptq_or_awq,
    Storage.AWQ: _gptq_or_awq,
}


def _order(tensors: StoredTensors, module: str, group_inputs: int) -> Tensor | None:
    """int64 [D]: the group of each input; None: groups are of neighbours."""
    name = next((one for one in (".g_idx", ".weight_g_idx") if module + one in tensors), None)
    if name is None:
        return None
    order_D = tensors.read(module + name).long()
    # compressed-tensors writes -1 where there is no order, others write nothing but 0.
    if (order_D == -1).all() or not order_D.any():
        return None
    return None if torch.equal(order_D, torch.arange(len(order_D)) // group_inputs) else order_D


def _check(
    module: str,
    shape: tuple[int, int],
    group_inputs: int,
    scales_EN: Tensor,
    zeros_EN: Tensor | None,
    *,
    is_whole: bool,
) -> None:
    num_groups = -(-shape[1] // group_inputs)
    allowed = [(shape[0], num_groups)]
    if num_groups == 1:
        allowed.append((1, 1))
    for name, found in (("scales", scales_EN), ("zero points", zeros_EN)):
        if found is not None and tuple(found.shape) not in allowed:
            raise ConfigError(
                f"{module}: {name} have shape {list(found.shape)}, but a weight of shape "
                f"{list(shape)} with groups of {group_inputs} inputs needs {list(allowed[0])}"
            )
    if not is_whole and num_groups == 1:
        raise ConfigError(f"{module}: an order of groups, but there is one group")


def _at_least_2d(numbers: Tensor) -> Tensor:
    """[E, N], or [1, 1] of one scale for all."""
    return numbers if numbers.dim() == 2 else numbers.reshape(-1, 1)
