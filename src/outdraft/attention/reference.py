"""Paged tree attention in plain PyTorch: the oracle, and the path of devices without a kernel.

It gathers the blocks of each request, builds the whole mask, and masks a dense softmax. No value
travels to the host.

Dimension key: B requests, T rows, M rows of the longest request, K keys of the longest request,
H heads, G kv heads, R query heads per kv head, C head size, P blocks, S slots per block.
"""

import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache


class ReferenceAttention:
    """Attention as attention/base.py states it, for any device and floating dtype.

    Scores and softmax are float64 for float64 queries and float32 otherwise. Rows behind the last
    request are padding: their result is zero.
    """

    name = "reference"

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
        k_BKGC = _gather_blocks(cache.k_PSGC, metadata).to(dtype)
        v_BKGC = _gather_blocks(cache.v_PSGC, metadata).to(dtype)  # a copy: gathered
        rows_BM, is_row_BM = _padded_rows(metadata, num_rows)
        mask_BMK = visible_keys(metadata, rows_BM, k_BKGC.shape[1], window) & is_row_BM[:, :, None]
        # A weight of zero does not silence a NaN that somebody else left in a reused block.
        v_BKGC.masked_fill_(~mask_BMK.any(dim=1)[:, :, None, None], 0.0)

        q_BMGRC = q_THC.to(dtype)[rows_BM].unflatten(2, (num_kv_heads, num_heads // num_kv_heads))
        scores_BGRMK = torch.einsum("bmgrc,bkgc->bgrmk", q_BMGRC, k_BKGC) * scale
        scores_BGRMK.masked_fill_(~mask_BMK[:, None, None], torch.finfo(dtype).min)
        weights_BGRMK = scores_BGRMK.softmax(dim=-1)
        out_BMGRC = torch.einsum("bgrmk,bkgc->bmgrc", weights_BGRMK, v_BKGC)
        out_BMHC = out_BMGRC.reshape(*rows_BM.shape, num_heads, head_size)
        # Add rather than assign: the padding of [B, M] all points at row T - 1 and adds zero.
        out_BMHC = out_BMHC.masked_fill(~is_row_BM[:, :, None, None], 0.0)
        out_THC = torch.zeros(q_THC.shape, dtype=dtype, device=q_THC.device)
        out_THC.index_add_(0, rows_BM.flatten(), out_BMHC.flatten(0, 1))
        return out_THC.to(q_THC.dtype)


def visible_keys(
    metadata: AttentionMetadata, rows_BM: Tensor, num_keys: int, window: int | None
) -> Tensor:
    """bool [B, M, K]: whether row rows[b, m] sees the key at cache index k of request b."""
    device = rows_BM.device
    context_B11 = metadata.context_lens_B.long()[:, None, None]
    causal_B11 = metadata.num_causal_B.long()[:, None, None]
    row_M1 = torch.arange(rows_BM.shape[1], device=device)[:, None]
    key_K = torch.arange(num_keys, device=device)

    seen_BMK = key_K <= context_B11 + torch.minimum(row_M1, causal_B11 - 1)
    draft_B1K = key_K - context_B11 - causal_B11  # which drafted row the key is, if not negative
    bits_BMK = metadata.ancestors_T[rows_BM][:, :, None] >> draft_B1K.clamp(0, 63)
    is_ancestor_BMK = (bits_BMK & 1).bool() & (draft_B1K >= 0) & (draft_B1K < 63)
    seen_BMK = seen_BMK | (is_ancestor_BMK & (row_M1 >= causal_B11))
    if window is None:
        return seen_BMK
    # The text position of a committed or causal key is its cache index; a draft has its depth.
    key_row_B1K = metadata.query_start_B1.long()[:-1, None, None] + key_K - context_B11
    last_row = metadata.positions_T.shape[0] - 1
    draft_position_B1K = metadata.positions_T[key_row_B1K.clamp(0, last_row)]
    position_B1K = torch.where(draft_B1K >= 0, draft_position_B1K, key_K)
    return seen_BMK & (position_B1K > metadata.positions_T[rows_BM][:, :, None] - window)


def _gather_blocks(cached_PSGC: Tensor, metadata: AttentionMetadata) -> Tensor:
    """[B, K, G, C]: the cache of each request in the order of its cache index."""
    block_size = cached_PSGC.shape[1]
    num_blocks = -(-metadata.max_seq_len // block_size)
    blocks_BP = metadata.block_table_BP[:, :num_blocks]
    return cached_PSGC[blocks_BP].flatten(1, 2)[:, : metadata.max_seq_len]


def _padded_rows(metadata: AttentionMetadata, num_rows: int) -> tuple[Tensor, Tensor]:
    """Flat row of the m-th row of request b, [B, M], and whether there is one."""
    starts_B1 = metadata.query_start_B1.long()
    rows_BM = starts_B1[:-1, None] + torch.arange(metadata.max_rows, device=starts_B1.device)
    return rows_BM.clamp(max=num_rows - 1), rows_BM < starts_B1[1:, None]
