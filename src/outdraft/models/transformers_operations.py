"""Calls of torch inside a transformers model that have to be the engine's.

Where the library has no table to register a function in, the calls of one module are caught.
Falcon attends by torch's function; routers multiply by it, and torch's products give a row other
bits beside other rows, so that a text could go to other experts because of its neighbours.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from outdraft.core.errors import ConfigError
from outdraft.kernels.ops import Kernels
from outdraft.kernels.products import Product
from outdraft.models.transformers_attention import attend

_ROUTERS = ("Router", "Gate")  # how the library's classes of routers end


def catch_operations(module: nn.Module, kernels: Kernels) -> None:
    """Let attention and products inside this module be computed by the engine's kernels."""
    forward = module.forward
    products: dict[tuple[torch.dtype, torch.Size], Product] = {}

    def own_forward(*args: Any, **kwargs: Any) -> Any:
        with _OwnOperations(module, kernels, products):
            return forward(*args, **kwargs)

    module.forward = own_forward


def leaves_threads(kernels: Kernels, network: nn.Module) -> bool:
    """Whether torch can do with one thread: it multiplies no experts that the kernels lack."""
    return kernels.has_threads and not any(weight.dim() > 2 for weight in network.parameters())


@contextmanager
def one_torch_thread(is_wanted: bool) -> Generator[None]:
    """Inside, torch leaves the other cores to the kernels' threads, if that is wanted.

    Those spin between two products. Where torch shares so little as a sum over the cores, each of
    the two waits for the other's cores: prompts took half as long again.
    """
    if not is_wanted:
        yield
        return
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def is_router(module: nn.Module) -> bool:
    """Whether it chooses experts by products of its own, of which it may read the weights."""
    weights = [part.weight for part in (module, *module.children()) if _has_weight(part)]
    return bool(weights) and type(module).__name__.endswith(_ROUTERS)


def _has_weight(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


class _OwnOperations(TorchFunctionMode):
    def __init__(
        self,
        module: nn.Module,
        kernels: Kernels,
        products: dict[tuple[torch.dtype, torch.Size], Product],
    ) -> None:
        """`products`: with the module's weights, by the dtypes that they were converted to."""
        super().__init__()
        self._module, self._kernels, self._products = module, kernels, products

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options = dict(kwargs or {})
        if func is F.scaled_dot_product_attention:
            mask = options.get("attn_mask")
            if mask is not None and mask.numel() > 1:
                name = type(self._module).__name__
                raise ConfigError(f"{name} adds to the scores of its attention, as ALiBi does")
            query, key, value = args[:3]
            scale = options.get("scale")
            out_1THE, _ = attend(self._module, query, key, value, None, scaling=scale)
            return out_1THE.transpose(1, 2).contiguous()
        if func is F.linear and is_router(self._module):
            return self._linear(*args, **options)
        return func(*args, **options)

    def _linear(self, x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None = None) -> Tensor:
        key = x_TD.dtype, weight_ED.shape
        product = self._products.get(key)
        if product is None:
            alike = [one for one in self._module.parameters() if one.shape == weight_ED.shape]
            if len(alike) != 1:
                name = type(self._module).__name__
                raise ConfigError(f"{name} has {len(alike)} weights of {tuple(weight_ED.shape)}")
            product = self._kernels.pack_linear(weight_ED, bias_E, None)
            self._products[key] = product
        return product(x_TD.flatten(0, -2)).unflatten(0, x_TD.shape[:-1])
