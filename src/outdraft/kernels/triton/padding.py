# pyright: reportCallIssue=false
# A launch takes more than the parameters of the kernel.
"""The rows of a pass in buffers of rounded sizes, by the kernel of padding_kernels.py.

Dimension key: T rows of the pass, M of the buffers.
"""

import triton
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.kernels.triton import padding_kernels as kernels

_TILE = 256  # blocks of a request that are copied at once


def pad_rows(
    token_ids_T: Tensor, metadata: AttentionMetadata, to_ids_M: Tensor, to: AttentionMetadata
) -> None:
    """Copy a pass into the larger tensors of another one.

    Rows after the last request are token 0 at position 0, kept nowhere. Requests after it have
    no rows.
    """
    table_BP, to_table_BP = metadata.block_table_BP, to.block_table_BP
    to_requests = len(to.context_lens_B)
    kernels.pad_rows[(to_requests + 1,)](
        token_ids_T,
        *_columns(metadata),
        table_BP,
        to_ids_M,
        *_columns(to),
        to_table_BP,
        len(token_ids_T),
        *table_BP.shape,
        len(to_ids_M),
        *to_table_BP.shape,
        table_BP.stride(0),
        WIDTH=triton.next_power_of_2(max(len(to_ids_M), to_requests) + 1),
        TILE=_TILE,
    )


def _columns(metadata: AttentionMetadata) -> tuple[Tensor, ...]:
    return (
        metadata.positions_T,
        metadata.slots_T,
        metadata.ancestors_T,
        metadata.query_start_B1,
        metadata.context_lens_B,
        metadata.num_causal_B,
    )
