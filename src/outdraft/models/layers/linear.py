"""A linear layer. Its weight is packed once, when it is loaded, as its kernel reads it fastest.

Dimension key: T rows, D inputs, E outputs.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.data.coded_weight import Codes
from outdraft.kernels.ops import Kernels
from outdraft.kernels.products import Product, ShardWrap
from outdraft.kernels.torch.linear import linear


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
        parts_ED: Sequence[Tensor] = (),
    ) -> None:
        """Make the product, once and for good; a plain weight that it does not read is freed.

        `parts_ED`: the rows of the weight where they lie elsewhere, all of its dtype.
        """
        assert self.weight is not None, "packed twice"
        bias_E = None if self.bias is None else self.bias.data
        weight_ED = parts_ED or self.weight.data
        if self._spread is None:
            self.product = kernels.pack_linear(weight_ED, bias_E, quantization)
        else:
            self.product = self._spread(kernels.pack_linear(weight_ED, None, quantization), bias_E)
        if self.product.nbytes > 0:
            self.weight = None

    def pack_codes(self, kernels: Kernels, weight: Codes, dtype: torch.dtype) -> None:
        """As `pack`, with a weight that comes as integers; `dtype`: of the rows."""
        assert self.weight is not None, "packed twice"
        bias_E = None if self.bias is None else self.bias.data
        if self._spread is None:
            self.product = kernels.pack_codes(weight, bias_E, dtype)
        else:
            self.product = self._spread(kernels.pack_codes(weight, None, dtype), bias_E)
        self.weight = None

    def owns(self, slot: Tensor) -> bool:
        """Whether a tensor is rows of the weight, which no other module reads."""
        if self.weight is None or self._is_shared:
            return False
        return slot.untyped_storage().data_ptr() == self.weight.untyped_storage().data_ptr()

    @property
    def format(self) -> WeightFormat:
        """How the weight is kept."""
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
    """Such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def numbers_of(module: nn.Module, dtype: torch.dtype) -> str:
    """What is computed, over which weights if they are kept otherwise: for people."""
    name = dtype_name(dtype)
    kept = {linear.format for linear in linears_of(module)} - {WeightFormat.PLAIN, name}
    return f"{name} over {' and '.join(sorted(kept))} weights" if kept else name


def memory_bytes(module: nn.Module) -> int:
    """What the weights of a module take, packed ones included."""
    plain = sum(weight.numel() * weight.element_size() for weight in module.parameters())
    return plain + sum(getattr(part, "packed_bytes", 0) for part in module.modules())


def _parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=dtype, device=device), requires_grad=False)
