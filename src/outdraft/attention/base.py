"""What attention promises the models, and the batch it reads.

One call serves prefill chunks, plain decoding and draft trees alike. The new rows of a request
are `num_causal` tokens of its own (the last of them is the root), then the rows of its draft.
A causal row sees everything before it. A drafted row sees the cache, all causal rows, and those
drafted rows whose bits are set in its ancestor mask. The k-th new row of a request is kept at
cache index context_len + k, whatever its position in the text (its depth in the tree) is.

Dimension key: B requests, T rows, H heads, G kv heads, C head size, P blocks, S slots per block.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from outdraft.kv.cache import LayerCache

__all__ = ["AttentionBackend", "AttentionMetadata", "LayerCache", "causal_metadata"]


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the rows of a batch stand. All tensors are on the model's device.

    Attributes:
        query_start_B1: int32 [B + 1]; rows [query_start[b], query_start[b + 1]) are request b's.
        context_lens_B: int32 [B]; tokens of each request that the cache held before this step.
        num_causal_B: int32 [B]; how many of its rows are causal, at least 1; the rest are drafts.
        ancestors_T: int64 [T]; bit j: the row sees drafted row j of its request (itself
            included). 0 for causal rows.
        positions_T: int64 [T]; position of each row in its text: context_len + k for the k-th
            causal row, position of the root + depth in the tree for a drafted row.
        slots_T: int64 [T]; flat cache slot (block * block_size + offset) of each row, -1: none.
        block_table_BP: int32 [B, P]; blocks of each request in order; unused places are 0.
        max_rows: the largest number of rows of one request, exactly: what is left of T bounds the
            others', which are on the device.
        max_seq_len: the largest context_len + rows of one request.
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


class AttentionBackend(Protocol):
    """Writes new keys and values to the paged cache, and attends over it."""

    name: str

    def write(self, k_TGC: Tensor, v_TGC: Tensor, cache: LayerCache, slots_T: Tensor) -> None:
        """Store k and v at their slots; rows with slot -1 are dropped."""
        ...

    def attend(
        self,
        q_THC: Tensor,
        cache: LayerCache,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """[T, H, C] of q's dtype: softmax(scale * q k^T) v over what each row sees.

        The rows' own keys and values are already written. H is a multiple of G; query head h
        reads kv head h // (H // G). With a sliding `window`, a row at text position p sees
        positions above p - window only. Scores and softmax are float32 at least.
        """
        ...


def causal_metadata(
    context_len: int, num_rows: int, slots_T: Tensor, block_table_P: Tensor
) -> AttentionMetadata:
    """The batch of one request with no drafts."""
    device = slots_T.device
    return AttentionMetadata(
        query_start_B1=torch.tensor([0, num_rows], dtype=torch.int32, device=device),
        context_lens_B=torch.tensor([context_len], dtype=torch.int32, device=device),
        num_causal_B=torch.tensor([num_rows], dtype=torch.int32, device=device),
        ancestors_T=torch.zeros(num_rows, dtype=torch.int64, device=device),
        positions_T=torch.arange(context_len, context_len + num_rows, device=device),
        slots_T=slots_T,
        block_table_BP=block_table_P[None],
        max_rows=num_rows,
        max_seq_len=context_len + num_rows,
    )
