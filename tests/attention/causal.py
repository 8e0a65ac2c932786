"""Batches of one request without drafts.

Dimension key: T rows, P blocks.
"""

import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata


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
