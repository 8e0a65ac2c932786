# numba infers the types of these functions and specialises on them.
# pyright: reportMissingParameterType=false, reportUnknownParameterType=false
# ruff: noqa: ANN001
"""The attention batch that reads one level of growing trees.

Dimension key: B requests, F nodes of a level, T = B * F rows, P blocks.
"""

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.core.jit import njit
from outdraft.drafting.device.draft_tree import Frontier


def level_batch(
    frontier: Frontier,
    context_lens_B: Tensor,
    num_drafts_B: Tensor,
    block_table_BP: Tensor,
    block_size: int,
    max_seq_len: int,
) -> AttentionMetadata:
    """The batch of a level whose rows are kept behind a network's committed tokens.

    Rows for which a request has no slot are computed, but neither kept nor seen by other rows.

    Args:
        context_lens_B: int64; what the network has read of each text.
        num_drafts_B: int64; slots behind that which belong to each request.
        max_seq_len: an upper bound.
    """
    make = level_batch_on_cpu if context_lens_B.is_cpu else level_batch_on_any_device
    return make(frontier, context_lens_B, num_drafts_B, block_table_BP, block_size, max_seq_len)


def level_batch_on_any_device(
    frontier: Frontier,
    context_lens_B: Tensor,
    num_drafts_B: Tensor,
    block_table_BP: Tensor,
    block_size: int,
    max_seq_len: int,
) -> AttentionMetadata:
    """As `level_batch`."""
    num_requests, width = frontier.token_ids_BF.shape
    device = context_lens_B.device
    places_F = torch.arange(width, device=device) + frontier.first_row
    has_slot_BF = places_F < num_drafts_B[:, None]
    index_BF = torch.where(has_slot_BF, context_lens_B[:, None] + places_F, 0)
    blocks_BF = block_table_BP.gather(1, index_BF // block_size)
    slots_BF = blocks_BF.long() * block_size + index_BF % block_size
    own_bits_B = (1 << num_drafts_B) - 1
    depth_B = num_drafts_B.clamp(max=frontier.depth)  # deeper rows have no slot
    return AttentionMetadata(
        query_start_B1=torch.arange(num_requests + 1, dtype=torch.int32, device=device) * width,
        context_lens_B=context_lens_B.int(),
        num_causal_B=torch.zeros(num_requests, dtype=torch.int32, device=device),
        ancestors_T=(frontier.ancestors_BF & own_bits_B[:, None]).flatten(),
        positions_T=(context_lens_B + depth_B - 1).repeat_interleave(width),
        slots_T=torch.where(has_slot_BF, slots_BF, -1).flatten(),
        block_table_BP=block_table_BP,
        max_rows=width,
        max_seq_len=max_seq_len,
    )


def level_batch_on_cpu(
    frontier: Frontier,
    context_lens_B: Tensor,
    num_drafts_B: Tensor,
    block_table_BP: Tensor,
    block_size: int,
    max_seq_len: int,
) -> AttentionMetadata:
    """As `level_batch`, in one compiled call."""
    num_requests, width = frontier.token_ids_BF.shape
    batch = blank_batch(num_requests, width, block_table_BP, max_seq_len)
    place_level(
        np.ascontiguousarray(frontier.ancestors_BF.numpy()),
        frontier.first_row,
        frontier.depth,
        context_lens_B.numpy(),
        num_drafts_B.numpy(),
        np.ascontiguousarray(block_table_BP.numpy()),
        block_size,
        batch.query_start_B1.numpy(),
        batch.context_lens_B.numpy(),
        batch.ancestors_T.numpy(),
        batch.positions_T.numpy(),
        batch.slots_T.numpy(),
    )
    return batch


def blank_batch(
    num_requests: int, width: int, block_table_BP: Tensor, max_seq_len: int
) -> AttentionMetadata:
    """A batch on the CPU for `place_level` to fill; what that does not know is there already."""
    query_start_B1 = np.empty(num_requests + 1, dtype=np.int32)
    context_lens_B, num_causal_B = np.zeros((2, num_requests), dtype=np.int32)
    ancestors_T, positions_T, slots_T = np.empty((3, num_requests * width), dtype=np.int64)
    return AttentionMetadata(
        query_start_B1=torch.from_numpy(query_start_B1),
        context_lens_B=torch.from_numpy(context_lens_B),
        num_causal_B=torch.from_numpy(num_causal_B),
        ancestors_T=torch.from_numpy(ancestors_T),
        positions_T=torch.from_numpy(positions_T),
        slots_T=torch.from_numpy(slots_T),
        block_table_BP=block_table_BP,
        max_rows=width,
        max_seq_len=max_seq_len,
    )


@njit(cache=True, nogil=True)
def place_level(
    ancestors_BF,
    first_row,
    depth,
    context_lens_B,
    num_drafts_B,
    block_table_BP,
    block_size,
    query_start_B1,
    short_lens_B,
    ancestors_T,
    positions_T,
    slots_T,
) -> None:
    """Fill the last five, as `level_batch` has them; short_lens are the context lengths."""
    num_requests, width = ancestors_BF.shape
    for b in range(num_requests):
        query_start_B1[b] = b * width
        short_lens_B[b] = context_lens_B[b]
        own_bits = (1 << num_drafts_B[b]) - 1
        for f in range(width):
            row, place = b * width + f, first_row + f
            ancestors_T[row] = ancestors_BF[b, f] & own_bits
            # Rows deeper than that have no slot.
            positions_T[row] = context_lens_B[b] + min(depth, num_drafts_B[b]) - 1
            slots_T[row] = -1
            if place < num_drafts_B[b]:
                index = context_lens_B[b] + place
                block = index // block_size
                slots_T[row] = block_table_BP[b, block] * block_size + index - block * block_size
    query_start_B1[num_requests] = num_requests * width
