"""The decoder-only network of Llama, Mistral, Qwen 2, Qwen 3, MiMo and EAGLE, layer by layer.

Dimension key: T rows, R rows whose logits are wanted, D hidden, X inputs of layer 0, H heads, G kv
heads, C head size, I intermediate, K tapped layers, N the head's own vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outdraft.attention.base import AttentionForm, AttentionMetadata, LayerCache
from outdraft.kernels.decoder_ops import DecoderSpec, LayerSpec
from outdraft.kernels.products import Product, VocabParallel
from outdraft.kernels.torch.pointwise import rms_norm, rotate, silu_mul


class TorchDecoder:
    """The passes of a decoder, for any device and floating dtype. It reads weights where they lie.

    All numbers have the network's dtype; statistics of norms, scores and softmax are float32 at
    least. A bfloat16 decoder of the compiled library rounds less: only inputs of products, cached
    keys and values, and what it returns.
    """

    fused = None
    silu_mul = staticmethod(silu_mul)

    def __init__(self, spec: DecoderSpec) -> None:
        self._spec = spec

    def __call__(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int] = (),
        states_TD: Tensor | None = None,
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        states_TD, tapped_TKD = self._all_rows(token_ids_T, caches, metadata, taps, states_TD)
        # Indexing by a tensor would wake OpenMP threads, which then keep the cores of ours.
        return states_TD if wanted_R is None else states_TD.index_select(0, wanted_R), tapped_TKD

    def logits(self, states_RD: Tensor) -> Tensor:
        logits_RN = self._spec.head(self._norm(states_RD, self._spec.head_norm_D))
        return logits_RN.to(torch.promote_types(logits_RN.dtype, torch.float32))

    def best_tokens(self, states_RD: Tensor) -> tuple[Tensor, Tensor]:
        logits_RN, head = self.logits(states_RD), self._spec.head
        if isinstance(head, VocabParallel):
            best_R, is_finite_R = head.shard.best_tokens(logits_RN)
        else:
            best_R = logits_RN.argmax(dim=-1)
            is_finite_R = logits_RN.gather(1, best_R[:, None])[:, 0].isfinite()
        ids_N = self._spec.draft_ids_N
        return best_R if ids_N is None else ids_N[best_R], is_finite_R

    def write_context(
        self,
        product: Product,
        features_TD: Tensor,
        caches: Sequence[LayerCache],
        positions_T: Tensor,
        slots_T: Tensor,
    ) -> None:
        layers, num_kv_heads = self._spec.layers, self._spec.num_kv_heads
        cos_sin_TC = self._spec.cos_sin_MC.index_select(0, positions_T)
        of_layers_T2GC = product(features_TD).unflatten(1, (len(layers), 2, num_kv_heads, -1))
        for layer, cache, of_layer_T2GC in zip(
            layers, caches, of_layers_T2GC.unbind(1), strict=True
        ):
            k_TGC, v_TGC = of_layer_T2GC.unbind(1)
            k_TGC = rotate(self._norm(k_TGC, layer.k_norm_C), cos_sin_TC)
            self._spec.attention.write(k_TGC, v_TGC, cache, slots_T)

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
        tapped = {0: residual_TD.clone()} if 0 in taps else {}
        next_norms = [*(layer.input_norm_D for layer in spec.layers[1:]), spec.final_norm_D]
        layers = zip(spec.layers, caches, next_norms, strict=True)
        for num_layers, (layer, cache, next_norm_D) in enumerate(layers, start=1):
            # No name holds what is added: it takes memory while it is computed only.
            x_TD = self._added(
                residual_TD, self._attend(layer, x_TX, cache, metadata), layer.post_norm_D
            )
            x_TX = self._added(
                residual_TD, layer.down(self.silu_mul(layer.gate_up(x_TD))), next_norm_D
            )
            if num_layers in taps:
                tapped[num_layers] = residual_TD.clone()  # it is added to in place
        tapped_TKD = residual_TD.new_empty(len(residual_TD), 0, residual_TD.shape[1])
        if taps:
            tapped_TKD = torch.stack([tapped[tap] for tap in taps], dim=1)
        return x_TX, tapped_TKD

    def _added(self, residual_TD: Tensor, added_TD: Tensor, norm_D: Tensor | None) -> Tensor:
        """Add in place; the normed sum, or the sum."""
        residual_TD += added_TD
        return self._norm(residual_TD, norm_D)

    def _enter(
        self, token_ids_T: Tensor, states_TD: Tensor | None, positions_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The first product's input, [T, X], and a new tensor that the layers add to, [T, D]."""
        table, shard = self._spec.embedding, self._spec.shard
        embedded_TD = table(token_ids_T) if shard is None else shard.embed(token_ids_T, table)
        entry, first_norm_D = self._spec.entry, self._spec.layers[0].input_norm_D
        if entry is None:
            return self._norm(embedded_TD, first_norm_D), embedded_TD
        assert states_TD is not None
        if entry.leaves_out_first:
            embedded_TD = embedded_TD.masked_fill(positions_T[:, None] == 0, 0)
        normed_TD = self._norm(states_TD, entry.state_norm_D)
        x_TX = torch.cat((self._norm(embedded_TD, entry.token_norm_D), normed_TD), dim=-1)
        if entry.fc is None:
            return x_TX, (normed_TD if entry.adds_to_normed else states_TD).clone()
        residual_TD = entry.fc(x_TX)
        return self._norm(residual_TD, first_norm_D), residual_TD

    def _norm(self, x_TD: Tensor, weight_D: Tensor | None) -> Tensor:
        return x_TD if weight_D is None else rms_norm(x_TD, weight_D, self._spec.eps)

    def _attend(
        self, layer: LayerSpec, x_TX: Tensor, cache: LayerCache, metadata: AttentionMetadata
    ) -> Tensor:
        """[T, D]: what attention adds."""
        num_heads, num_kv_heads = self._spec.num_heads, self._spec.num_kv_heads
        cos_sin_TC = self._spec.cos_sin_MC.index_select(0, metadata.positions_T)
        heads_THC = layer.qkv(x_TX).unflatten(-1, (num_heads + 2 * num_kv_heads, -1))
        q_THC, k_TGC, v_TGC = heads_THC.split((num_heads, num_kv_heads, num_kv_heads), dim=1)
        q_THC = rotate(self._norm(q_THC, layer.q_norm_C), cos_sin_TC)
        k_TGC = rotate(self._norm(k_TGC, layer.k_norm_C), cos_sin_TC)
        attention = self._spec.attention
        if layer.is_causal:
            metadata = with_earlier_drafts(metadata)
        attention.write(k_TGC, v_TGC, cache, metadata.slots_T)
        form = AttentionForm(self._spec.scale, layer.window)
        out_THC = attention.attend(q_THC, cache, metadata, form)
        return layer.o(out_THC.flatten(1))


def with_earlier_drafts(metadata: AttentionMetadata) -> AttentionMetadata:
    """The batch in which rows see no drafted token after their own place in the text."""
    firsts_B = (metadata.context_lens_B + metadata.num_causal_B).long()
    ends_B, positions_T = metadata.query_start_B1[1:], metadata.positions_T
    rows_T = torch.arange(len(positions_T), dtype=torch.int32, device=positions_T.device)
    requests_T = torch.searchsorted(ends_B.contiguous(), rows_T, right=True)
    # Rows after the last request are padding: whatever they get will do.
    firsts_T = firsts_B.index_select(0, requests_T.clamp_max(len(firsts_B) - 1))
    places_T = (positions_T - firsts_T).clamp(min=-1)
    ancestors_T = metadata.ancestors_T & ((1 << (places_T + 1)) - 1)
    return replace(metadata, ancestors_T=ancestors_T)
