"""Paged tree attention in plain PyTorch: the oracle, and the path of devices without a kernel.

It gathers the blocks of a few requests, builds the whole mask, and computes a masked dense softmax.
No value travels to the host. Only the device knows how many rows each request has. The host knows
bounds, since requests are sorted by their number of rows: a long prompt chunk does not make every
other request as long.

Dimension key: B requests, T rows, N requests and M rows of each in one piece, K keys of the longest
request, H heads, G kv heads, R query heads per kv head, C head size, P blocks, S slots per block.

An engine on a CPU lets sums run in the order of the keys, one number after the other, so that a
row's result does not depend on the rows beside it: what a row does not see adds zeros, wherever it
stands. A product of matrices, which is faster, sums in an order that changes with its shape.
"""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from outdraft.attention.base import AttentionMetadata, AttentionSizes, LayerCache
from outdraft.core.draft import MAX_DRAFTS

MAX_ELEMENTS = 1 << 26  # 256 MiB of float32
_MASK_BYTES = 32  # for each row and key: three int64 on the way to the mask, and its bools


class ReferenceAttention:
    """Attention as attention/base.py states it, for any device and floating dtype.

    Scores and softmax are float64 for float64 queries and float32 otherwise. Rows behind the last
    request are padding: their result is zero.
    """

    def __init__(self, max_elements: int = MAX_ELEMENTS, *, in_order: bool = False) -> None:
        """`max_elements`: of a temporary tensor, but for one request's keys or one row's scores.

        `in_order`: on a CPU only: whether sums run in the order of the keys.
        """
        self._max_elements = max_elements
        self._in_order = in_order

    def temporary_bytes(self, most: AttentionSizes) -> int:
        """As `AttentionBackend`."""
        own, wide = most.dtype.itemsize, torch.promote_types(most.dtype, torch.float32).itemsize
        key = most.num_keys * most.num_kv_heads * most.head_size
        keys = min(most.num_requests * key, max(self._max_elements, key))
        size = most.head_size if self._in_order else 1  # of what is summed for a score
        score = most.num_keys * most.num_heads * size
        # The bounds of _pieces pad a piece to twice the rows of the batch at most.
        numbers = min(2 * most.num_rows * score, max(self._max_elements, score))
        scores = numbers // size
        if self._in_order:
            keys += 2 * numbers // 3  # the products, and their running sums
        return keys * (own + 3 * wide) + scores * 3 * wide + scores // most.num_heads * _MASK_BYTES

    def write(self, k_TGC: Tensor, v_TGC: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
        """Store k and v at their slots; rows with slot -1 are dropped."""
        if slots_T.numel() == 0:
            return
        # A dropped row repeats the first row that is kept; if none is, slot 0 keeps its value.
        kept_T = slots_T >= 0
        stand_in, any_kept = kept_T.int().argmax(), kept_T.any()
        rows_T = torch.arange(len(slots_T), device=slots_T.device)
        rows_T = torch.where(kept_T, rows_T, stand_in)
        slots_T = slots_T[rows_T].clamp(min=0)
        for new_TGC, cached_PSGC in ((k_TGC, cache.k_PSGC), (v_TGC, cache.v_PSGC)):
            cached = cached_PSGC.flatten(0, 1)
            new = new_TGC[rows_T].to(cached.dtype)
            cached.index_copy_(0, slots_T, torch.where(any_kept, new, cached[slots_T]))

    def attend(
        self,
        q_THC: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """[T, H, C] of q's dtype: softmax(scale * q k^T) v over what each row sees."""
        num_rows, num_heads, head_size = q_THC.shape
        num_kv_heads = cache.k_PSGC.shape[2]
        dtype = torch.promote_types(q_THC.dtype, torch.float32)
        num_keys = metadata.max_seq_len
        key_size = num_kv_heads * head_size
        row_size = num_heads * head_size if self._in_order else num_heads  # for each key
        most_requests = max(1, self._max_elements // (num_keys * max(key_size, row_size)))
        softmax = _softmax_in_order if self._in_order else _softmax
        out_THC = torch.zeros(q_THC.shape, dtype=dtype, device=q_THC.device)
        for requests_N, longest in _pieces(metadata, num_rows, most_requests):
            all_rows_M = torch.arange(longest, device=q_THC.device)
            padded_rows = _padded_rows(metadata, requests_N, all_rows_M, num_rows)
            k_NKGC, v_NKGC = _gather(cache, metadata, requests_N, padded_rows, dtype)
            most_rows = max(1, self._max_elements // (len(requests_N) * row_size * num_keys))
            for first in range(0, longest, most_rows):
                rows_M = all_rows_M[first : first + most_rows]
                rows_NM, is_row_NM = (x_NM[:, first : first + most_rows] for x_NM in padded_rows)
                mask_NMK = visible_keys(metadata, requests_N, rows_M, rows_NM, window)
                q_NMHC = q_THC[rows_NM].to(dtype)
                out_NMHC = softmax(q_NMHC, k_NKGC, v_NKGC, mask_NMK, scale)
                # Add rather than assign: padding points at some row too, and adds zero to it.
                out_NMHC = out_NMHC.masked_fill(~is_row_NM[:, :, None, None], 0.0)
                out_THC.index_add_(0, rows_NM.flatten(), out_NMHC.flatten(0, 1))
        return out_THC.to(q_THC.dtype)


def visible_keys(
    metadata: AttentionMetadata,
    requests_N: Tensor,
    rows_M: Tensor,
    rows_NM: Tensor,
    window: int | None,
) -> Tensor:
    """bool [N, M, K]: whether a row sees the key at cache index k of its request.

    rows_M are places within a request, rows_NM where the rows are in the batch.
    """
    context_N11 = metadata.context_lens_B.long()[requests_N, None, None]
    causal_N11 = metadata.num_causal_B.long()[requests_N, None, None]
    row_M1 = rows_M[:, None]
    key_K = torch.arange(metadata.max_seq_len, device=rows_M.device)

    seen_NMK = key_K <= context_N11 + torch.minimum(row_M1, causal_N11 - 1)
    if window is not None:  # the text position of a committed or causal key is its cache index
        seen_NMK = seen_NMK & (key_K > metadata.positions_T[rows_NM][:, :, None] - window)
    draft_N1K = key_K - context_N11 - causal_N11  # which drafted token the key is, if not negative
    ancestors_NM = _nearest(metadata.ancestors_T[rows_NM], window)
    bits_NMK = ancestors_NM[:, :, None] >> draft_N1K.clamp(0, MAX_DRAFTS)
    is_ancestor_NMK = (bits_NMK & 1).bool() & (draft_N1K >= 0) & (draft_N1K < MAX_DRAFTS)
    return seen_NMK | (is_ancestor_NMK & (row_M1 >= causal_N11))


def _nearest(ancestors_NM: Tensor, window: int | None) -> Tensor:
    """The masks' `window` highest bits: the rank of an ancestor from the top is its distance."""
    if window is None or window >= MAX_DRAFTS:
        return ancestors_NM
    kept_NM = seen_NM = torch.zeros_like(ancestors_NM)
    for draft in reversed(range(MAX_DRAFTS)):
        bit_NM = ancestors_NM & (1 << draft)
        kept_NM = torch.where(seen_NM < window, kept_NM | bit_NM, kept_NM)
        seen_NM = seen_NM + (bit_NM != 0)
    return kept_NM


def _softmax(
    q_NMHC: Tensor, k_NKGC: Tensor, v_NKGC: Tensor, mask_NMK: Tensor, scale: float
) -> Tensor:
    """[N, M, H, C]; rows that see nothing have a finite result that means nothing."""
    num_heads, num_kv_heads = q_NMHC.shape[2], k_NKGC.shape[2]
    q_NMGRC = q_NMHC.unflatten(2, (num_kv_heads, num_heads // num_kv_heads))
    scores_NGRMK = torch.einsum("nmgrc,nkgc->ngrmk", q_NMGRC, k_NKGC) * scale
    scores_NGRMK.masked_fill_(~mask_NMK[:, None, None], torch.finfo(scores_NGRMK.dtype).min)
    weights_NGRMK = scores_NGRMK.softmax(dim=-1)
    return torch.einsum("ngrmk,nkgc->nmgrc", weights_NGRMK, v_NKGC).flatten(2, 3)


def _softmax_in_order(
    q_NMHC: Tensor, k_NKGC: Tensor, v_NKGC: Tensor, mask_NMK: Tensor, scale: float
) -> Tensor:
    """As `_softmax`, on a CPU: each sum adds one number after the other, in the order of the keys.

    A key that is not seen adds zero. exp is numpy's: torch computes vectors by one method and what
    is left behind them by another.
    """
    num_heads, num_kv_heads = q_NMHC.shape[2], k_NKGC.shape[2]
    q_NM1GRC = q_NMHC.unflatten(2, (num_kv_heads, num_heads // num_kv_heads))[:, :, None]
    scores_NMKGR = _last_sum(q_NM1GRC * k_NKGC[:, None, :, :, None], -1) * scale
    hidden_NMK11 = ~mask_NMK[..., None, None]
    scores_NMKGR.masked_fill_(hidden_NMK11, torch.finfo(scores_NMKGR.dtype).min)
    scores_NMKGR -= scores_NMKGR.amax(dim=2, keepdim=True)
    np.exp(scores_NMKGR.numpy(), out=scores_NMKGR.numpy())
    total_NMGR = _last_sum(scores_NMKGR, 2)
    out_NMGRC = _last_sum(scores_NMKGR[..., None] * v_NKGC[:, None, :, :, None], 2)
    return (out_NMGRC / total_NMGR[..., None]).flatten(2, 3)


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
    """Keys and values [N, K, G, C] of some requests in the order of their cache index."""
    block_size, num_keys = cache.k_PSGC.shape[1], metadata.max_seq_len
    blocks_NP = metadata.block_table_BP[requests_N, : -(-num_keys // block_size)]
    k_NKGC = cache.k_PSGC[blocks_NP].flatten(1, 2)[:, :num_keys].to(dtype)
    v_NKGC = cache.v_PSGC[blocks_NP].flatten(1, 2)[:, :num_keys].to(dtype)  # a copy: gathered
    # A reused block may hold a NaN from before, and a weight of zero would not remove it.
    rows_NM, is_row_NM = padded_rows
    bits_N1 = _union(metadata.ancestors_T[rows_NM] * is_row_NM)
    first_draft_N1 = (metadata.context_lens_B + metadata.num_causal_B).long()[requests_N, None]
    draft_NK = torch.arange(num_keys, device=rows_NM.device) - first_draft_N1
    is_bit_NK = (bits_N1 >> draft_NK.clamp(0, MAX_DRAFTS)) & 1 == 1
    is_seen_NK = (draft_NK < 0) | (is_bit_NK & (draft_NK < MAX_DRAFTS))
    return k_NKGC, v_NKGC.masked_fill_(~is_seen_NK[:, :, None, None], 0.0)


def _union(bits_NM: Tensor) -> Tensor:
    """[N, 1]: the bits that any of M masks has."""
    while bits_NM.shape[1] > 1:
        bits_NM = functional.pad(bits_NM, (0, bits_NM.shape[1] % 2))
        bits_NM = bits_NM[:, ::2] | bits_NM[:, 1::2]
    return bits_NM


def _padded_rows(
    metadata: AttentionMetadata, requests_N: Tensor, rows_M: Tensor, num_rows: int
) -> tuple[Tensor, Tensor]:
    """Where the m-th row of request n is in the batch, [N, M], and whether there is one."""
    starts_B1 = metadata.query_start_B1.long()
    rows_NM = starts_B1[requests_N, None] + rows_M
    return rows_NM.clamp(max=num_rows - 1), rows_NM < starts_B1[requests_N + 1, None]
