"""The contract of attention, and the batch that it reads.

One call serves prefill chunks, plain decoding, draft trees and single levels of a growing tree. The
rows of a request are first `num_causal` tokens of its own text, the last of which is the root, and
then drafted tokens. With first_draft = context_len + num_causal:

- The key of the k-th causal row is at cache index context_len + k; it sees all indices up to its
  own.
- The key of drafted token j is at cache index first_draft + j, whatever its position in the text
  (its depth in the tree) is. A drafted row sees all indices below first_draft, and those drafted
  tokens whose bits are set in its ancestor mask, its own among them.

An earlier call may have written some of a request's drafted tokens; then they are no rows of this
call. Attention does not need to know which drafted tokens the rows of a call are: ancestors_T says
what each row sees, and slots_T says where each row is written. Everything that a row sees has been
written when `attend` is called. What no row of a request sees does not change its results, not even
if it is NaN.

Dimension key: B requests, T rows, H heads, G kv heads, C size of a query and a key, E size of a
value, P blocks, S slots per block.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outdraft.kv.block_pool import LayerCacheShape
from outdraft.kv.cache import LayerCache


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The places of the rows of a batch. All tensors are on the model's device.

    Attributes:
        query_start_B1: int32 [B + 1]; rows [query_start[b], query_start[b + 1]) are request b's,
            at least one.
        context_lens_B: int32 [B]; tokens of each request's text that the cache already held.
        num_causal_B: int32 [B]; how many of its rows are causal; the rest are drafted. 0: all are,
            and the root is the last token that the cache held.
        ancestors_T: int64 [T]; bit j: the row sees drafted token j of its request (itself
            included). In topological order: an ancestor has a lower bit. 0 for causal rows. In a
            block (drafted tokens 0, 1, ... at consecutive positions) every row has the bits of the
            whole block, later rows included; then a window is at least as long as the block.
        positions_T: int64 [T]; position of each row in its text: context_len + k for the k-th
            causal row, position of the root + depth in the tree for a drafted row.
        slots_T: int64 [T]; flat cache slot (block * block_size + offset) of each row, -1: none.
        block_table_BP: int32 [B, P]; blocks of each request in order; unused places are 0.
        max_rows: the largest number of rows of one request. It is exact, so that T - max_rows
            bounds the rows of all others, whose numbers are on the device.
        max_seq_len: the largest cache index that a row sees, plus one.
    """

    query_start_B1: Tensor
    context_lens_B: Tensor
    num_causal_B: Tensor
    ancestors_T: Tensor
    positions_T: Tensor
    slots_T: Tensor
    block_table_BP: Tensor
    max_rows: int
    max_seq_len: int


@dataclass(frozen=True, slots=True, eq=False)
class AttentionForm:
    """The function of one layer from queries, keys and values.

    A row at text position p sees no key before `first_seen` of p. A key of the text has its cache
    index as position; the position of a drafted ancestor is p less the number of the row's
    ancestors after it. So a drafted row sees what a causal row at the end of its text would see.

    Attributes:
        scale: of the products of queries and keys.
        window: a row sees positions above p - window only (Beltagy, Peters, Cohan 2020; as in
            Mistral).
        chunk: a row sees positions from p // chunk * chunk on only: the text falls into chunks
            that do not see each other (Llama 4's `attention_chunk_size`).
        soft_cap: a score s becomes soft_cap * tanh(s / soft_cap) before the softmax (Bello et al.
            2016; Gemma 2's `attn_logit_softcapping`).
        sinks_H: of any floating dtype, on the model's device. One learned score of each query
            head joins the softmax's denominator, as that of a key whose value is zero; it is
            neither scaled nor capped (GPT-OSS's `sinks`, `s_aux` of its kernels).

    Raises:
        ValueError: a window, a chunk or a cap that is not positive.
    """

    scale: float
    window: int | None = None
    chunk: int | None = None
    soft_cap: float | None = None
    sinks_H: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("window", "chunk", "soft_cap"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} of attention must be positive, not {value}")

    def first_seen(self, positions_T: Tensor) -> Tensor:
        """int64, of the same shape: the lowest position that each position sees. A window may begin
        before the text, at negative positions."""
        if self.chunk is None:
            return positions_T - self.window + 1 if self.window else torch.zeros_like(positions_T)
        first_T = positions_T // self.chunk * self.chunk
        if self.window is not None:
            first_T = torch.maximum(first_T, positions_T - self.window + 1)
        return first_T


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """Most sizes of a batch of a layer; queries and cache have one dtype."""

    num_requests: int
    num_rows: int
    num_keys: int
    num_heads: int
    cache: LayerCacheShape
    dtype: torch.dtype


class AttentionBackend(Protocol):
    """Writes new keys and values to the paged cache, and attends over it."""

    def write(self, k_TGC: Tensor, v_TGE: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
        """Store k and v at their slots; rows with slot -1 are dropped."""
        ...

    def attend(
        self, q_THC: Tensor, cache: LayerCache, metadata: AttentionMetadata, form: AttentionForm
    ) -> Tensor:
        """[T, H, E] of q's dtype: softmax(scale * q k^T) v over what each row sees, in the layer's
        form.

        The rows' own keys and values are already written. H is a multiple of G; query head h
        reads kv head h // (H // G). Scores and softmax are float32 at least.
        """
        ...

    def temporary_bytes(self, most: AttentionSizes) -> int:
        """Most bytes that `attend` takes besides queries and result, for batches up to this."""
        ...


def with_dense_rows(rows_THC: Tensor) -> Tensor:
    """Make the rows contiguous; a slice of a fused projection has such rows already."""
    if rows_THC.stride(2) == 1 and rows_THC.stride(1) == rows_THC.shape[2]:
        return rows_THC
    return rows_THC.contiguous()
