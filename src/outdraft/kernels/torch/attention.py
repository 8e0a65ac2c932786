"""Paged tree attention in plain PyTorch: the oracle, and the path of devices without a kernel.

It gathers the blocks of a few requests, builds the whole mask, and computes a masked dense softmax.
No value travels to the host. Only the device knows how many rows each request has. The host knows
bounds, since requests are sorted by their number of rows: a long prompt chunk does not make every
other request as long.

Dimension key: B requests, T rows, N requests and M rows of each in one piece, K keys of the longest
request, H heads, G kv heads, R query heads per kv head, C size of a key, E size of a value, P
blocks, S slots per block.

An engine on a CPU lets sums run in the order of the keys, one number after the other, so that a
row's result does not depend on the rows beside it: what a row does not see adds zeros, wherever it
stands. A product of matrices, which is faster, sums in an order that changes with its shape.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outdraft.attention.base import AttentionForm, AttentionMetadata, AttentionSizes, LayerCache
from outdraft.core.draft import MAX_DRAFTS

MAX_ELEMENTS = 1 << 26  # 256 MiB of float32
_MASK_BYTES = 32  # for each row and key: three int64 on the way to the mask, and its bools


class TorchAttention:
    """Attention as attention/base.py states it, for any device and floating dtype.

    Scores and softmax are float64 for float64 queries and float32 otherwise. Rows after the last
    request are padding: their result is zero.
    """

    def __init__(self, max_elements: int = MAX_ELEMENTS, *, in_order: bool = False) -> None:
        """`max_elements`: of a temporary tensor, but for one request's keys or one row's scores.

        `in_order`: on a CPU only: whether sums run in the order of the keys.
        """
        self._max_elements = max_elements
        self._in_order = in_order

    def temporary_bytes(self, most: AttentionSizes) -> int:
        own, wide = most.dtype.itemsize, torch.promote_types(most.dtype, torch.float32).itemsize
        key_size, value_size = most.cache.key_size, most.cache.value_size
        key = most.num_keys * most.cache.num_kv_heads * max(key_size, value_size)
        keys = min(most.num_requests * key, max(self._max_elements, key))
        size = max(key_size, value_size) if self._in_order else 1  # of what is summed for a score
        score = most.num_keys * most.num_heads * size
        # The bounds of _pieces pad a piece to twice the rows of the batch at most.
        numbers = min(2 * most.num_rows * score, max(self._max_elements, score))
        scores = numbers // size
        if self._in_order:
            keys += 2 * numbers // 3  # the products, and their running sums
        return keys * (own + 3 * wide) + scores * 3 * wide + scores // most.num_heads * _MASK_BYTES

    def write(self, k_TGC: Tensor, v_TGE: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
        """Store k and v at their slots; rows with slot -1 are dropped."""
        if slots_T.numel() == 0:
            return
        # A dropped row repeats the first row that is kept; if none is, slot 0 keeps its value.
        kept_T = slots_T >= 0
        stand_in, any_kept = kept_T.int().argmax(), kept_T.any()
        rows_T = torch.arange(len(slots_T), device=slots_T.device)
        rows_T = torch.where(kept_T, rows_T, stand_in)
        slots_T = slots_T[rows_T].clamp(min=0)
        for new_TGC, cached_PSGC in ((k_TGC, cache.k_PSGC), (v_TGE, cache.v_PSGE)):
            cached = cached_PSGC.flatten(0, 1)
            new = new_TGC[rows_T].to(cached.dtype)
            cached.index_copy_(0, slots_T, torch.where(any_kept, new, cached[slots_T]))

    def attend(
        self, q_THC: Tensor, cache: LayerCache, metadata: AttentionMetadata, form: AttentionForm
    ) -> Tensor:
        """[T, H, E] of q's dtype, as `AttentionBackend`."""
        num_rows, num_heads, key_size = q_THC.shape
        num_kv_heads, value_size = cache.v_PSGE.shape[2:]
        head_size = max(key_size, value_size)
        dtype = torch.promote_types(q_THC.dtype, torch.float32)
        num_keys = metadata.max_seq_len
        row_size = num_heads * head_size if self._in_order else num_heads  # for each key
        most_size = max(num_kv_heads * head_size, row_size)
        most_requests = max(1, self._max_elements // (num_keys * most_size))
        starts_B1 = metadata.query_start_B1.long()
        softmax = _softmax_in_order if self._in_order else _softmax
        out_THE = q_THC.new_zeros((num_rows, num_heads, value_size), dtype=dtype)
        for requests_N, longest in _pieces(metadata, num_rows, most_requests):
            all_rows_M = torch.arange(longest, device=q_THC.device)
            rows_NM = starts_B1[requests_N, None] + all_rows_M
            is_row_NM = rows_NM < starts_B1[requests_N + 1, None]
            padded_rows = rows_NM.clamp(max=num_rows - 1), is_row_NM
            k_NKGC, v_NKGE = _gather(cache, metadata, requests_N, padded_rows, dtype)
            most_rows = max(1, self._max_elements // (len(requests_N) * row_size * num_keys))
            for first in range(0, longest, most_rows):
                rows_M = all_rows_M[first : first + most_rows]
                rows_NM, is_row_NM = (x_NM[:, first : first + most_rows] for x_NM in padded_rows)
                mask_NMK = visible_keys(metadata, requests_N, rows_M, rows_NM, form)
                q_NMHC = q_THC[rows_NM].to(dtype)
                out_NMHE = softmax(q_NMHC, k_NKGC, v_NKGE, mask_NMK, form)
                # Add rather than assign: padding points at some row too, and adds zero to it.
                out_NMHE = out_NMHE.masked_fill(~is_row_NM[:, :, None, None], 0.0)
                out_THE.index_add_(0, rows_NM.flatten(), out_NMHE.flatten(0, 1))
        return out_THE.to(q_THC.dtype)


def visible_keys(
    metadata: AttentionMetadata,
    requests_N: Tensor,
    rows_M: Tensor,
    rows_NM: Tensor,
    form: AttentionForm,
) -> Tensor:
    """bool [N, M, K]: whether a row sees the key at cache index k of its request.

    rows_M are places within a request, rows_NM where the rows are in the batch.
    """
    context_N11 = metadata.context_lens_B.long()[requests_N, None, None]
    causal_N11 = metadata.num_causal_B.long()[requests_N, None, None]
    row_M1 = rows_M[:, None]
    key_K = torch.arange(metadata.max_seq_len, device=rows_M.device)

    seen_NMK = key_K <= context_N11 + torch.minimum(row_M1, causal_N11 - 1)
    ancestors_NM = metadata.ancestors_T[rows_NM]
    if form.window is not None or form.chunk is not None:
        position_NM = metadata.positions_T[rows_NM]
        first_NM = form.first_seen(position_NM)
        # The text position of a committed or causal key is its cache index.
        seen_NMK = seen_NMK & (key_K >= first_NM[:, :, None])
        if form.chunk is not None or (form.window or 0) < MAX_DRAFTS:
            ancestors_NM = _nearest(ancestors_NM, position_NM - first_NM + 1)
    draft_N1K = key_K - context_N11 - causal_N11  # which drafted token the key is, if not negative
    bits_NMK = ancestors_NM[:, :, None] >> draft_N1K.clamp(0, MAX_DRAFTS)
    is_ancestor_NMK = (bits_NMK & 1).bool() & (draft_N1K >= 0) & (draft_N1K < MAX_DRAFTS)
    return seen_NMK | (is_ancestor_NMK & (row_M1 >= causal_N11))


def _nearest(ancestors_NM: Tensor, count_NM: Tensor) -> Tensor:
    """The `count` highest bits of masks: the rank of an ancestor from the top is its distance."""
    kept_NM = seen_NM = torch.zeros_like(ancestors_NM)
    for draft in reversed(range(MAX_DRAFTS)):
        bit_NM = ancestors_NM & (1 << draft)
        kept_NM = torch.where(seen_NM < count_NM, kept_NM | bit_NM, kept_NM)
        seen_NM = seen_NM + (bit_NM != 0)
    return kept_NM


def _softmax(
    q_NMHC: Tensor, k_NKGC: Tensor, v_NKGE: Tensor, mask_NMK: Tensor, form: AttentionForm
) -> Tensor:
    """[N, M, H, E]; rows that see nothing have a finite result that means nothing."""
    num_heads, num_kv_heads = q_NMHC.shape[2], k_NKGC.shape[2]
    sizes = (num_kv_heads, num_heads // num_kv_heads)
    scores_NGRMK = torch.einsum("nmgrc,nkgc->ngrmk", q_NMHC.unflatten(2, sizes), k_NKGC)
    scores_NGRMK *= form.scale
    if form.soft_cap is not None:
        scores_NGRMK.div_(form.soft_cap).tanh_().mul_(form.soft_cap)
    scores_NGRMK.masked_fill_(~mask_NMK[:, None, None], torch.finfo(scores_NGRMK.dtype).min)
    if form.sinks_H is None:
        weights_NGRMK = scores_NGRMK.softmax(dim=-1)
    else:
        sinks_GR11 = form.sinks_H.to(scores_NGRMK).view(*sizes, 1, 1)
        top_NGRM1 = torch.maximum(scores_NGRMK.amax(dim=-1, keepdim=True), sinks_GR11)
        weights_NGRMK = scores_NGRMK.sub_(top_NGRM1).exp_()
        weights_NGRMK /= weights_NGRMK.sum(-1, keepdim=True) + (sinks_GR11 - top_NGRM1).exp()
    return torch.einsum("ngrmk,nkge->nmgre", weights_NGRMK, v_NKGE).flatten(2, 3)


def _softmax_in_order(
    q_NMHC: Tensor, k_NKGC: Tensor, v_NKGE: Tensor, mask_NMK: Tensor, form: AttentionForm
) -> Tensor:
    """Compute `_softmax` on a CPU: each sum adds one number after the other, in key order.

    A key that is not seen adds zero. exp and tanh are numpy's: torch computes vectors by one method
    and the rest by another.
    """
    num_heads, num_kv_heads = q_NMHC.shape[2], k_NKGC.shape[2]
    sizes = (num_kv_heads, num_heads // num_kv_heads)
    q_NM1GRC = q_NMHC.unflatten(2, sizes)[:, :, None]
    scores_NMKGR = _last_sum(q_NM1GRC * k_NKGC[:, None, :, :, None], -1) * form.scale
    if form.soft_cap is not None:
        scores_NMKGR /= form.soft_cap
        np.tanh(scores_NMKGR.numpy(), out=scores_NMKGR.numpy())
        scores_NMKGR *= form.soft_cap
    hidden_NMK11 = ~mask_NMK[..., None, None]
    scores_NMKGR.masked_fill_(hidden_NMK11, torch.finfo(scores_NMKGR.dtype).min)
    top_NM1GR = scores_NMKGR.amax(dim=2, keepdim=True)
    sinks_GR = None if form.sinks_H is None else form.sinks_H.to(scores_NMKGR).view(sizes)
    if sinks_GR is not None:
        top_NM1GR = torch.maximum(top_NM1GR, sinks_GR)
    scores_NMKGR -= top_NM1GR
    np.exp(scores_NMKGR.numpy(), out=scores_NMKGR.numpy())
    total_NMGR = _last_sum(scores_NMKGR, 2)
    if sinks_GR is not None:
        total_NMGR += torch.from_numpy(np.exp((sinks_GR - top_NM1GR[:, :, 0]).numpy()))
    out_NMGRE = _last_sum(scores_NMKGR[..., None] * v_NKGE[:, None, :, :, None], 2)
    return (out_NMGRE / total_NMGR[..., None]).flatten(2, 3)


def _last_sum(x: Tensor, dim: int) -> Tensor:
    """The sum over a dimension, taken in its order."""
    return x.cumsum(dim).select(dim, -1).clone()


def _pieces(
    metadata: AttentionMetadata, num_rows: int, most_requests: int
) -> Iterator[tuple[Tensor, int]]:
    """Requests of about the same number of rows together, and what they have at most.

    Sorted by the number of rows, the first has max_rows. Each of the others has one row at least;
    of what is left of T, the one at place i has an i-th part at most, as those before it have no
    less. A new piece begins where the bound has fallen to half.
    """
    counts_B = metadata.query_start_B1.diff()
    order_B = counts_B.argsort(descending=True, stable=True)
    spare = num_rows - metadata.max_rows - (len(order_B) - 1)
    bounds = [min(metadata.max_rows, 1 + spare // max(i, 1)) for i in range(len(order_B))]
    bounds[0] = metadata.max_rows
    first = 0
    for i in range(1, len(bounds) + 1):
        is_full = i - first >= most_requests
        if i == len(bounds) or is_full or 2 * bounds[i] <= bounds[first]:
            yield order_B[first:i], bounds[first]
            first = i


def _gather(
    cache: LayerCache,
    metadata: AttentionMetadata,
    requests_N: Tensor,
    padded_rows: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """Keys [N, K, G, C] and values [N, K, G, E] of some requests, in the order of the cache."""
    block_size, num_keys = cache.k_PSGC.shape[1], metadata.max_seq_len
    blocks_NP = metadata.block_table_BP[requests_N, : -(-num_keys // block_size)]
    k_NKGC = cache.k_PSGC[blocks_NP].flatten(1, 2)[:, :num_keys].to(dtype)
    v_NKGE = cache.v_PSGE[blocks_NP].flatten(1, 2)[:, :num_keys].to(dtype)  # a copy: gathered
    # A reused block may hold a NaN from before, and a weight of zero would not remove it.
    rows_NM, is_row_NM = padded_rows
    bits_N1 = _union(metadata.ancestors_T[rows_NM] * is_row_NM)
    first_draft_N1 = (metadata.context_lens_B + metadata.num_causal_B).long()[requests_N, None]
    draft_NK = torch.arange(num_keys, device=rows_NM.device) - first_draft_N1
    is_bit_NK = (bits_N1 >> draft_NK.clamp(0, MAX_DRAFTS)) & 1 == 1
    is_seen_NK = (draft_NK < 0) | (is_bit_NK & (draft_NK < MAX_DRAFTS))
    return k_NKGC, v_NKGE.masked_fill_(~is_seen_NK[:, :, None, None], 0.0)


def _union(bits_NM: Tensor) -> Tensor:
    """[N, 1]: the bits that any of M masks has."""
    while bits_NM.shape[1] > 1:
        bits_NM = functional.pad(bits_NM, (0, bits_NM.shape[1] % 2))
        bits_NM = bits_NM[:, ::2] | bits_NM[:, 1::2]
    return bits_NM


def block_mass(
    q_BHC: Tensor, k_PSGC: Tensor, block_table_BP: Tensor, num_keys_B: Tensor, scale: float
) -> Tensor:
    """Sum one row's attention over each block of its text: float32 [B, P], new.

    softmax(scale * q k^T) over the first keys of each request, summed over all heads and over the
    slots of each block; 0 for blocks after them.

    Args:
        q_BHC: of one row of each request, of the dtype of the keys.
        k_PSGC: of the layer's cache.
        block_table_BP: int32, as in AttentionMetadata.
        num_keys_B: int64, at least 1.
    """
    block_size, num_kv_heads = k_PSGC.shape[1:3]
    width = block_table_BP.shape[1]
    dtype = torch.promote_types(q_BHC.dtype, torch.float32)
    keys_K = torch.arange(width * block_size, device=q_BHC.device)
    masses: list[Tensor] = []
    for q_HC, blocks_P, num_keys in zip(q_BHC, block_table_BP, num_keys_B, strict=True):
        k_KGC = k_PSGC[blocks_P.long()].flatten(0, 1).to(dtype)
        q_GRC = q_HC.to(dtype).unflatten(0, (num_kv_heads, -1))
        scores_GRK = torch.einsum("grc,kgc->grk", q_GRC, k_KGC) * scale
        weights_GRK = scores_GRK.masked_fill(keys_K >= num_keys, -torch.inf).softmax(-1)
        masses.append(weights_GRK.sum((0, 1)).view(width, block_size).sum(1))
    return torch.stack(masses).float()
