"""Operations inside a transformers model that the engine computes: attention, and calls of torch.

The library lets other code compute attention: a registered function gets the queries, keys and
values of a layer. Ours writes keys and values to the cache, and attends over it. No mask is built:
the batch says what each row sees. Rows of all requests are one flat text, [1, T], whose positions
are given.

Where the library has no table to register a function in, the calls of one module are caught.
Falcon attends by torch's function; routers multiply by it, and torch's products give a row other
bits in another batch, so that a text could go to other experts because of its neighbours.

Dimension key: T rows, H heads, G kv heads, C head size of queries and keys, E that of values or
outputs of a product, N all numbers of one row.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface

from outdraft.attention.base import AttentionBackend, AttentionForm, AttentionMetadata, LayerCache
from outdraft.core.errors import ConfigError
from outdraft.kernels.ops import Kernels, Product
from outdraft.kv.block_pool import LayerCacheShape

NAME = "outdraft"  # of the attention function, among those of the library
# The library's names for options of a layer's attention.
_WINDOW, _SOFT_CAP, _SINKS = "sliding_window", "softcap", "s_aux"
# Options that it passes, too, and that change nothing for flat rows.
_IGNORED = {"dropout", "is_causal", "position_ids", "position_embeddings", "use_cache"}
_ROUTERS = ("Router", "Gate")  # how the library's classes of routers end

# Computes the attention of a module: [T, H, E] of its queries, keys, values and options.
_Attention = Callable[[nn.Module, Tensor, Tensor, Tensor, Mapping[str, Any]], Tensor]
_attention: ContextVar[_Attention] = ContextVar("attention")


def paged(
    backend: AttentionBackend,
    layers: Mapping[nn.Module, tuple[LayerCache, AttentionForm]],
    metadata: AttentionMetadata,
) -> _Attention:
    """A pass over the cache."""

    def attention(
        module: nn.Module, q_THC: Tensor, k_TGC: Tensor, v_TGE: Tensor, _: Mapping[str, Any]
    ) -> Tensor:
        cache, form = layers[module]
        backend.write(k_TGC, v_TGE, cache, metadata.slots_T)
        return backend.attend(q_THC, cache, metadata, form)

    return attention


class Survey:
    """A pass that finds out what attention the layers ask for. What it returns means nothing.

    Attributes:
        forms: by the module that attends, in the order of the layers.
        caches: one for each of them.
        num_heads: the most of a layer.
        seen_2N: queries, keys and values of two rows, of float64.
    """

    def __init__(self) -> None:
        self.forms: dict[nn.Module, AttentionForm] = {}
        self.caches: list[LayerCacheShape] = []
        self.num_heads, self.seen_2N = 0, list[Tensor]()

    def __call__(
        self,
        module: nn.Module,
        q_THC: Tensor,
        k_TGC: Tensor,
        v_TGE: Tensor,
        options: Mapping[str, Any],
    ) -> Tensor:
        if module in self.forms:
            raise ConfigError(f"{type(module).__name__} attends twice in one pass")
        num_heads, key_size = q_THC.shape[1:]
        num_kv_heads, value_size = v_TGE.shape[1:]
        self.forms[module] = _form_of(module, key_size, options)
        self.caches.append(LayerCacheShape(num_kv_heads, key_size, value_size))
        self.num_heads = max(self.num_heads, num_heads)
        self.seen_2N += [heads.flatten(1).double() for heads in (q_THC, k_TGC, v_TGE)]
        return v_TGE.repeat_interleave(num_heads // num_kv_heads, dim=1)


@contextmanager
def computed_by(attention: _Attention) -> Generator[None]:
    """Inside, the layers' attention is computed so."""
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)


def register() -> None:
    """Make `NAME` known to the library."""
    AttentionInterface.register(NAME, attend)


def attend(
    module: nn.Module,
    q_1HTC: Tensor,
    k_1GTC: Tensor,
    v_1GTE: Tensor,
    attention_mask: Tensor | None,
    **options: Any,
) -> tuple[Tensor, None]:
    """[1, T, H, E], as the library's attention functions.

    Raises:
        ConfigError: the layer has made a mask of its own, although it was given none.
    """
    if attention_mask is not None:
        raise ConfigError(f"{type(module).__name__} adds to the scores of its attention")
    q_THC, k_TGC, v_TGE = (heads[0].transpose(0, 1) for heads in (q_1HTC, k_1GTC, v_1GTE))
    return _attention.get()(module, q_THC, k_TGC, v_TGE, options)[None], None


def _form_of(module: nn.Module, key_size: int, options: Mapping[str, Any]) -> AttentionForm:
    """The form of attention that the options ask for.

    Raises:
        ConfigError: one of them is not supported.
    """
    known = {"scaling", _WINDOW, _SOFT_CAP, _SINKS}
    for name, value in options.items():
        if name not in known | _IGNORED and value is not None and value is not False:
            raise ConfigError(f"{type(module).__name__} asks for attention with {name}={value!r}")
    if getattr(module, "is_causal", True) is not True:
        raise ConfigError(f"{type(module).__name__} looks ahead in the text")
    scale = options.get("scaling")
    sinks_H = options.get(_SINKS)
    return AttentionForm(
        scale=key_size**-0.5 if scale is None else float(scale),
        window=options.get(_WINDOW),
        soft_cap=options.get(_SOFT_CAP),
        sinks_H=None if sinks_H is None else sinks_H.detach(),
    )


def catch_operations(module: nn.Module, kernels: Kernels) -> None:
    """Let attention and products inside this module be computed by the engine's kernels."""
    forward, own = module.forward, _OwnOperations(module, kernels)

    def own_forward(*args: Any, **kwargs: Any) -> Any:
        with own:
            return forward(*args, **kwargs)

    module.forward = own_forward


def leaves_threads(kernels: Kernels, network: nn.Module) -> bool:
    """Is true if torch can do with one thread: it multiplies no experts that the kernels lack."""
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
    """Is true if it chooses experts by products of its own, of which it may read the weights."""
    weights = [getattr(part, "weight", None) for part in (module, *module.children())]
    has_product = any(isinstance(one, nn.Parameter) and one.dim() == 2 for one in weights)
    return has_product and type(module).__name__.endswith(_ROUTERS)


class _OwnOperations(TorchFunctionMode):
    def __init__(self, module: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        self._module, self._kernels = module, kernels
        # With the module's weights, by the dtypes that they were converted to.
        self._products: dict[tuple[torch.dtype, torch.Size], Product] = {}

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
