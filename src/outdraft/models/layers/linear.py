"""A linear layer whose weight can be packed for the CPU.

From about four rows on, an unpacked product copies the whole weight into the layout that its kernel
needs. Speculation works with just as many rows: five would cost twice as much as one. Packing makes
that copy once, so that a handful of rows costs little more than one.

On a CPU a row's result does not depend on the rows beside it, bit for bit: a text does not change
with what is computed together. Libraries choose other code, with another order of the sums, for
one row (oneDNN), or for as few rows as each thread happens to get (MKL). So one row of oneDNN is
computed as two, and what is not packed is multiplied row by row.

Dimension key: T rows, D inputs, E outputs.
"""

from collections.abc import Callable
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outdraft.models.layers.linear_bf16 import Bf16Product
from outdraft.models.layers.linear_team import shared_team

_PACK_ROWS = 64  # oneDNN lays a weight out for this many rows; any other number computes the same


class Packing(StrEnum):
    """How a weight lies in memory."""

    PLAIN = "plain"  # row major, for any device and dtype
    BF16 = "bf16"  # weights of bfloat16, sums of float32; on any CPU
    ONEDNN = "onednn"  # float32, and bfloat16 on a CPU that multiplies bfloat16


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
            product = _bind_onednn(self.weight.data, self.bias)
            self.packed_bytes = self.weight.nbytes
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
        if x_TD.device.type == "cpu":
            return _row_by_row(x_TD, self.weight, self.bias)
        return F.linear(x_TD, self.weight, self.bias)


def _bind_onednn(weight_ED: Tensor, bias_E: Tensor | None) -> Callable[[Tensor], Tensor]:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight_ED, _PACK_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x_TD: Tensor) -> Tensor:
        num_rows = x_TD.shape[0]
        if num_rows == 1:  # computed by other code, which sums in another order
            x_TD = x_TD.repeat(2, 1)
        return multiply(x_TD, packed, bias_E, "none", [], "")[:num_rows]

    return product


def _row_by_row(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
    """Every row is copied to an address of its own: where a row begins may change its sums too."""
    if x_TD.shape[0] == 0:
        return F.linear(x_TD, weight_ED, bias_E)
    return torch.cat([F.linear(x_1D.clone(), weight_ED, bias_E) for x_1D in x_TD.split(1)])


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
