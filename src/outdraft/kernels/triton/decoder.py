"""Whole passes of a decoder on a GPU: few launches for a layer, or one for all of them.

What it means is torch/decoder.py. Passes of few rows are replayed as graphs (graphs.py).

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
from outdraft.kernels.triton.graphs import GraphedPasses
from outdraft.kernels.triton.pointwise import HeadNorms, add_and_norm, rotate_heads, silu_mul


class TritonDecoder(TorchDecoder):
    """A decoder's passes, for the dtypes that Triton's attention reads."""

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
        run, graphs = self._all_rows, self._graphs
        # A pass that is a part of a graph already becomes none of its own.
        is_captured = token_ids_T.is_cuda and torch.cuda.is_current_stream_capturing()
        if graphs is not None and not is_captured and graphs.can_run(len(token_ids_T)):
            run = graphs
        states_TD, tapped_TKD = run(token_ids_T, caches, metadata, taps, states_TD)
        if wanted_R is not None and len(wanted_R) < len(states_TD):
            states_TD = states_TD.index_select(0, wanted_R)
        return states_TD, tapped_TKD

    def _all_rows(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int],
        states_TD: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """The states of all rows, and the tapped streams."""
        spec = self._spec
        x_TX, residual_TD = self._enter(token_ids_T, states_TD, metadata.positions_T)
        residual_TD = residual_TD.contiguous()
        tapped = {0: residual_TD.clone()} if 0 in taps else {}
        added_TD: Tensor | None = None
        layers = zip(spec.layers, caches, strict=True)
        for num_layers, (layer, cache) in enumerate(layers):
            if num_layers > 0:
                x_TX = self._added(residual_TD, added_TD, layer.input_norm_D)
                if num_layers in taps:
                    tapped[num_layers] = residual_TD.clone()  # it is added to in place
            attended_TD = self._attention(layer, x_TX, cache, metadata)
            x_TD = self._added(residual_TD, attended_TD, layer.post_norm_D)
            added_TD = layer.down(silu_mul(layer.gate_up(x_TD)))
        out_TD = self._added(residual_TD, added_TD, spec.final_norm_D)
        tapped[len(spec.layers)] = residual_TD
        tapped_TKD = residual_TD.new_empty(len(residual_TD), 0, residual_TD.shape[1])
        if taps:
            tapped_TKD = torch.stack([tapped[tap] for tap in taps], dim=1)
        return out_TD, tapped_TKD

    def _added(self, residual_TD: Tensor, added_TD: Tensor | None, norm_D: Tensor | None) -> Tensor:
        """Add in place; the normed sum, or the sum."""
        if norm_D is not None:
            return add_and_norm(residual_TD, added_TD, norm_D, self._spec.eps)
        if added_TD is not None:
            residual_TD += added_TD
        return residual_TD

    def _norm(self, x_TD: Tensor, weight_D: Tensor | None) -> Tensor:
        if weight_D is None:
            return x_TD
        return add_and_norm(x_TD.contiguous(), None, weight_D, self._spec.eps)

    def _attention(
        self, layer: LayerSpec, x_TX: Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        """[T, D]: what attention adds."""
        spec, norms = self._spec, HeadNorms(layer.q_norm_C, layer.k_norm_C)
        q_THC = rotate_heads(
            layer.qkv(x_TX), spec.num_heads, norms, spec.cos_sin_MC, cache, metadata, spec.eps
        )
        if layer.is_causal:
            metadata = with_earlier_drafts(metadata)
        form = AttentionForm(spec.scale, layer.window)
        return layer.o(spec.attention.attend(q_THC, cache, metadata, form).flatten(1))
