"""Whole passes of a decoder on a GPU: few launches for a layer, or one for all of them.

What it means is torch/decoder.py. Passes of few rows are replayed as graphs (graphed.py).

Dimension key: T rows, R wanted rows, X inputs of layer 0, D hidden, K tapped layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from outdraft.attention.base import AttentionForm, AttentionMetadata, LayerCache
from outdraft.kernels.decoder_ops import DecoderSpec, LayerSpec
from outdraft.kernels.ops import WarmUps
from outdraft.kernels.products import RowParallel
from outdraft.kernels.torch.decoder import TorchDecoder, with_earlier_drafts
from outdraft.kernels.triton.attention import decode_tile_rows
from outdraft.kernels.triton.graphed import GraphedPasses
from outdraft.kernels.triton.pointwise import add_and_norm, rotate_heads, silu_mul


class TritonDecoder(TorchDecoder):
    """A decoder's passes, for the dtypes that Triton's attention reads."""

    silu_mul = staticmethod(silu_mul)

    def __init__(self, spec: DecoderSpec, *, has_graphs: bool, warm_ups: WarmUps) -> None:
        """
        Args:
            has_graphs: passes of few rows become graphs. Those of several ranks never do: their
                sums wait for each other.
            warm_ups: counts sizes of passes that are new, and graphs.
        """
        super().__init__(spec)
        self._graphs: GraphedPasses | None = None
        if has_graphs and not isinstance(spec.layers[0].o, RowParallel):
            heads_per_kv = spec.num_heads // spec.num_kv_heads
            head_size, itemsize = spec.cos_sin_MC.shape[1], spec.embedding.dtype.itemsize
            few_rows = decode_tile_rows(heads_per_kv, head_size, itemsize)
            self._graphs = GraphedPasses(self._all_rows, few_rows, warm_ups)

    def __call__(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int] = (),
        states_TD: Tensor | None = None,
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        graphs = self._graphs
        # A pass that is a part of a graph already becomes none of its own.
        is_captured = token_ids_T.is_cuda and torch.cuda.is_current_stream_capturing()
        if graphs is None or is_captured or not graphs.can_run(len(token_ids_T)):
            return super().__call__(token_ids_T, caches, metadata, taps, states_TD, wanted_R)
        states_TD, tapped_TKD = graphs(token_ids_T, caches, metadata, taps, states_TD)
        if wanted_R is not None and len(wanted_R) < len(states_TD):
            states_TD = states_TD.index_select(0, wanted_R)
        return states_TD, tapped_TKD

    def _added(self, residual_TD: Tensor, added_TD: Tensor, norm_D: Tensor | None) -> Tensor:
        """Add in place; the normed sum, or the sum."""
        if norm_D is not None:
            return add_and_norm(residual_TD, added_TD, norm_D, self._spec.eps)
        return super()._added(residual_TD, added_TD, None)

    def _norm(self, x_TD: Tensor, weight_D: Tensor | None) -> Tensor:
        if weight_D is None:
            return x_TD
        return add_and_norm(x_TD.contiguous(), None, weight_D, self._spec.eps)

    def _attend(
        self, layer: LayerSpec, x_TX: Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        """[T, D]: what attention adds."""
        q_THC = rotate_heads(layer.qkv(x_TX), self._spec, layer, cache, metadata)
        if layer.is_causal:
            metadata = with_earlier_drafts(metadata)
        form = AttentionForm(self._spec.scale, layer.window)
        return layer.o(self._spec.attention.attend(q_THC, cache, metadata, form).flatten(1))
