"""Modules that networks are built of: a linear layer and a norm.

A linear layer's weight is packed once, when it is loaded, as its kernel reads it fastest.

Dimension key: T rows, D inputs or hidden, E outputs.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.ops import Kernels, Product
from outdraft.kernels.products import EmbeddingTable, ShardWrap
from outdraft.kernels.torch.linear import linear
from outdraft.kernels.torch.pointwise import rms_norm


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
        spread: ShardWrap | None = None,
    ) -> None:
        """The weight, or this rank's part of it.

        Args:
            weight: of another module, to be shared; if packed, that module keeps the plain one.
            spread: over ranks; None: the outputs are those of this weight.
        """
        super().__init__()
        self.num_outputs, self._spread = num_outputs, spread
        self._is_shared = weight is not None
        if weight is None:
            weight = _parameter((num_outputs, num_inputs), dtype, device)
        self.weight: nn.Parameter | None = weight
        self.bias = _parameter((num_outputs,), dtype, device) if bias else None
        self.product: Product | None = None

    def pack(
        self,
        kernels: Kernels,
        quantization: WeightFormat | None = None,
        source: Codes | Sequence[Tensor] = (),
    ) -> None:
        """Make the product, once and for good; a plain weight that it does not read is freed.

        `source`: the codes of the weight; or its rows where they lie elsewhere, all of its dtype.
        """
        assert self.weight is not None, "packed twice"
        bias_E = None if self.bias is None else self.bias.data
        own_bias_E, dtype = bias_E if self._spread is None else None, self.weight.dtype
        if isinstance(source, Codes):
            self.weight = None
            product = kernels.pack_codes(source, own_bias_E, dtype)
        else:
            product = kernels.pack_linear(source or self.weight.data, own_bias_E, quantization)
        self.product = product if self._spread is None else self._spread(product, bias_E)
        if self.product.nbytes > 0:
            self.weight = None

    def owns(self, slot: Tensor) -> bool:
        """Is true if a tensor is rows of the weight, which no other module reads."""
        if self.weight is None or self._is_shared:
            return False
        return slot.untyped_storage().data_ptr() == self.weight.untyped_storage().data_ptr()

    @property
    def format(self) -> WeightFormat:
        """The format that the weight is kept in."""
        return WeightFormat.PLAIN if self.product is None else self.product.format

    @property
    def packed_bytes(self) -> int:
        """Bytes of the layout that replaced the plain weight, or that copied a shared one."""
        return 0 if self.product is None else self.product.nbytes

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, E] of x's dtype."""
        if self.product is not None:
            return self.product(x_TD)
        assert self.weight is not None
        assert self._spread is None, "a product over ranks must be packed"
        return linear(x_TD, self.weight, self.bias)


def linears_of(module: nn.Module) -> Iterator[Linear]:
    """All products of a module."""
    return (part for part in module.modules() if isinstance(part, Linear))


def pack_linears(
    module: nn.Module, kernels: Kernels, quantization: WeightFormat | None = None
) -> None:
    """Make all products of a module, once and for good."""
    for part in linears_of(module):
        part.pack(kernels, quantization)


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def numbers_of(module: nn.Module, dtype: torch.dtype) -> str:
    """The dtype that is computed, and the weights under it if they are kept otherwise."""
    name = dtype_name(dtype)
    kept = {linear.format for linear in linears_of(module)} - {WeightFormat.PLAIN, name}
    return f"{name} over {' and '.join(sorted(kept))} weights" if kept else name


def memory_bytes(module: nn.Module) -> int:
    """Bytes of the weights of a module, packed ones included."""
    plain = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    return plain + sum(getattr(part, "packed_bytes", 0) for part in module.modules())


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)


def is_one_tensor(table: EmbeddingTable, head: Linear) -> bool:
    """Is true if an embedding reads the weight of a head: its codes, or its plain numbers."""
    if isinstance(table.source, Tensor):
        weight = head.weight
        return weight is not None and weight.data_ptr() == table.source.data_ptr()
    return table.source is head.product


class RMSNorm(nn.Module):
    """x / rms(x) * weight; memory is not initialised."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        weight_D = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(weight_D, requires_grad=False)
        self.eps = eps

    def forward(self, x_TD: Tensor) -> Tensor:
        """[T, D] of x's dtype."""
        return rms_norm(x_TD, self.weight, self.eps)


def norm_weight(norm: RMSNorm | None) -> Tensor | None:
    """The weight, if there is a norm."""
    return None if norm is None else norm.weight.data
