"""A linear layer whose weight can be packed for the CPU.

From about four rows on, an unpacked product copies the whole weight into the layout that its kernel
needs. Speculation works with just as many rows: five would cost twice as much as one. Packing makes
that copy once, so that a handful of rows costs little more than one.

Dimension key: T rows, D inputs, E outputs.
"""

from collections.abc import Callable
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outdraft.models.layers.linear_bf16 import Bf16Product
from outdraft.models.layers.linear_team import shared_team

# MKL lays a weight out for this many rows. Any other number of rows computes the same; laid out
# for fewer, larger products are slow, and laid out for one row, MKL packs nothing at all.
_PACK_ROWS = 64


class Packing(StrEnum):
    """How a weight lies in memory."""

    PLAIN = "plain"  # row major, for any device and dtype
    MKL = "mkl"  # float32 on an x86 CPU
    BF16 = "bf16"  # weights of bfloat16, sums of float32; on any CPU
    ONEDNN = "onednn"  # bfloat16 on a CPU that multiplies bfloat16, float32 without MKL


def cpu_multiplies_bfloat16() -> bool:
    """Whether this CPU has instructions for it; without them libraries emulate bfloat16."""
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))


def best_packing(
    dtype: torch.dtype, device: torch.device, *, weights_fit_bfloat16: bool = False
) -> Packing:
    """The fastest layout that this machine has for a dtype.

    Args:
        weights_fit_bfloat16: whether all weights of a float32 model are the same in bfloat16.
    """
    if device.type != "cpu":
        return Packing.PLAIN
    if dtype is torch.float32 and weights_fit_bfloat16:
        return Packing.BF16
    if dtype is torch.float32 and torch.backends.mkl.is_available():
        return Packing.MKL
    if dtype is torch.float32 and torch.backends.mkldnn.is_available():
        return Packing.ONEDNN
    if dtype is torch.bfloat16:
        has_packing = cpu_multiplies_bfloat16() and torch.backends.mkldnn.is_available()
        return Packing.ONEDNN if has_packing else Packing.BF16
    return Packing.PLAIN


class Linear(nn.Module):
    """y = x W^T + b, with W [E, D]; memory is not initialised."""

    def __init__(
        self,
        num_inputs: int,
        num_outputs: int,
        *,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        weight: nn.Parameter | None = None,
    ) -> None:
        """`weight`: of another module, to be shared; if packed, that module keeps the plain one."""
        super().__init__()
        self.num_outputs = num_outputs
        self.packed_bytes = 0  # of the layout that replaced or copied the plain weight
        if weight is None:
            weight = _parameter((num_outputs, num_inputs), dtype, device)
        self.weight: nn.Parameter | None = weight
        self.bias = _parameter((num_outputs,), dtype, device) if bias else None
        self.packing = Packing.PLAIN
        self._packed_product: Callable[[Tensor], Tensor] | None = None

    def pack(self, packing: Packing) -> None:
        """Bring the weight into a layout, once and for good; the plain weight is freed.

        Raises:
            RuntimeError: this build of torch does not have the layout for the weight's dtype.

        NOTE: BF16 rounds a float32 weight that bfloat16 does not hold: see best_packing.
        """
        assert self.weight is not None, "packed twice"
        if packing is Packing.PLAIN:
            return
        if packing is Packing.BF16:
            team = shared_team(torch.get_num_threads())
            product = Bf16Product(self.weight.data, self.bias, team)
            self.packed_bytes = product.nbytes
        else:
            bind = _bind_mkl if packing is Packing.MKL else _bind_onednn
            product = bind(self.weight.data, self.bias)
            self.packed_bytes = self.weight.nbytes  # MKL reserves more, but touches about as much
        self._packed_product = product
        self.packing = packing
        self.weight = None

    def packed_addresses(self) -> tuple[int, int]:
        """Where weights and bias are, for linear_kernels; only if packed as bf16."""
        assert isinstance(self._packed_product, Bf16Product)
        return self._packed_product.addresses()

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, E] of x's dtype."""
        if self._packed_product is not None:
            return self._packed_product(x_TD)
        assert self.weight is not None
        return F.linear(x_TD, self.weight, self.bias)


def _bind_mkl(weight_ED: Tensor, bias_E: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkl._mkl_reorder_linear_weight(weight_ED, _PACK_ROWS)
    # The call asks the plain weight for its shape only; a scalar that is broadcast has one too.
    shape_ED = weight_ED.new_zeros(1).expand(weight_ED.shape)
    multiply = torch.ops.mkl._mkl_linear.default
    # NOTE: told another number of rows than x has, this call would multiply by the plain weight.
    return lambda x_TD: multiply(x_TD, packed, shape_ED, bias_E, x_TD.shape[0])


def _bind_onednn(weight_ED: Tensor, bias_E: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_ED, _PACK_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default
    return lambda x_TD: multiply(x_TD, packed, bias_E, "none", [], "")


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
