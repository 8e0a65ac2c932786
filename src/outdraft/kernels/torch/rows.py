"""Places of rows and the tokens that they read: on the host row by row, else by tensors.

Dimension key: B requests that sample of W works; T rows, N most drafts of one request, F rows of a
level of a growing tree, S texts of L tokens, D numbers of a row.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from outdraft.attention.rows import RowBatch, Span
from outdraft.kernels.data.drafts import DraftBatch, ancestors_BN1N, depths_BN1
from outdraft.kernels.decoder_ops import StatePlaces
from outdraft.kernels.draft_ops import DraftStart


def place_rows(
    spans: Sequence[Span], extra: Sequence[Sequence[int]], block_size: int, width: int
) -> RowBatch:
    """Lay out the rows of a step: for each request its causal rows, then its drafted ones.

    New contiguous tensors on the host.

    Args:
        spans: one at least; only those that sample have parents.
        extra: numbers to pass on as int64 tensors.
        width: N, the places of each work's drafts.
    """
    starts, ancestors, positions, slots = [0], list[int](), list[int](), list[int]()
    state_index, draft_index = list[int](), list[int]()
    logit_rows, root_rows, draft_slots = list[int](), list[int](), list[list[int]]()
    for context_len, num_causal, parents, blocks, text_start, samples in spans:
        root, num_drafts = len(positions) + num_causal - 1, len(parents)
        places = range(context_len, context_len + num_causal)
        positions += places
        ancestors += [0] * num_causal
        state_index += [text_start + place for place in places] + [0] * num_drafts
        draft_index += [-1] * num_causal
        draft_index += [len(root_rows) * width + place for place in range(num_drafts)]
        for place, parent in enumerate(parents):
            above = root + parent
            positions.append(positions[above] + 1)
            ancestors.append(ancestors[above] | 1 << place)
        for index in range(context_len, context_len + num_causal + num_drafts):
            slots.append(blocks[index // block_size] * block_size + index % block_size)
        starts.append(len(positions))
        if samples:
            root_rows.append(root)
            logit_rows += range(root, len(positions))
            draft_slots.append(slots[root + 1 :] + [-1] * (width - num_drafts))
    table_width = max(len(span.block_ids) for span in spans)
    blocks = [[*span.block_ids, *[0] * (table_width - len(span.block_ids))] for span in spans]
    int32, int64 = (partial(torch.tensor, dtype=dtype) for dtype in (torch.int32, torch.int64))
    return RowBatch(
        query_start_B1=int32(starts),
        context_lens_B=int32([span.context_len for span in spans]),
        num_causal_B=int32([span.num_causal for span in spans]),
        ancestors_T=int64(ancestors),
        positions_T=int64(positions),
        slots_T=int64(slots),
        block_table_BP=int32(blocks),
        max_rows=max([span.num_rows for span in spans]),
        max_seq_len=max([span.context_len + span.num_rows for span in spans]),
        state_index_T=int64(state_index),
        draft_index_T=int64(draft_index),
        logit_rows_R=int64(logit_rows),
        root_rows_B=int64(root_rows),
        draft_slots_BN=int64(draft_slots).view(len(root_rows), width),
        extra=tuple(map(int64, extra)),
    )


def shape_rows(drafts: DraftBatch, rows: RowBatch) -> RowBatch:
    """Give drafted rows the position and the ancestors that follow from the drafts' parents.

    Args:
        drafts: B, N > 0.
        rows: those of a draft follow its root, in order; others keep what they have.
    """
    device = drafts.device
    is_draft_T, index_T = rows.draft_index_T >= 0, rows.draft_index_T.clamp_min(0)
    places_T = torch.arange(len(index_T), device=device)
    root_T = (places_T - 1 - index_T % drafts.width).clamp_min(0)
    bits_N = 1 << torch.arange(drafts.width, device=device)
    depth_BN = depths_BN1(drafts)[:, 1:]
    seen_BN = (ancestors_BN1N(drafts)[:, 1:] * bits_N).sum(2)
    depth_T, seen_T = (one.flatten()[index_T] for one in (depth_BN, seen_BN))
    shaped_T = rows.positions_T[root_T] + depth_T
    return replace(
        rows,
        positions_T=torch.where(is_draft_T, shaped_T, rows.positions_T),
        ancestors_T=torch.where(is_draft_T, seen_T, rows.ancestors_T),
    )


def place_states(rows: RowBatch, kept_rows_BN: Tensor, row_len: int, window: int) -> StatePlaces:
    """Find the places of a pass's states, in windows over the newest tokens of texts.

    Token i of text s has place s * window + i % window. All tensors are new.

    Args:
        kept_rows_BN: int64, as rows_BN of a Verdict.
        row_len: L, of the texts.
    """
    state_index_T, root_rows_B = rows.state_index_T, rows.root_rows_B
    starts_W1, contexts_W, causal_W = (
        one.long() for one in (rows.query_start_B1, rows.context_lens_B, rows.num_causal_B)
    )
    num_rows = len(state_index_T)
    flat_T = torch.arange(num_rows, device=starts_W1.device)
    work_T = torch.searchsorted(starts_W1[1:], flat_T, right=True)
    place_T = flat_T - starts_W1[work_T]  # in its work
    texts_W = state_index_T[starts_W1[:-1]] // row_len
    is_kept_T = (place_T < causal_W[work_T]) & (place_T >= causal_W[work_T] - window)
    in_window_T = (contexts_W[work_T] + place_T) % window
    places_T = torch.where(is_kept_T, texts_W[work_T] * window + in_window_T, -1)
    last_rows_W = starts_W1[1:] - 1
    if not len(root_rows_B):
        return StatePlaces(places_T, last_rows_W, places_T[last_rows_W])
    work_B = work_T[root_rows_B]
    rows_BN1 = root_rows_B[:, None] + 1 + pad(kept_rows_BN, (1, 0), value=-1)
    last_rows_W = last_rows_W.index_copy(0, work_B, rows_BN1.amax(1))  # a path goes down
    # Refused drafts go to one row more, which is cut off.
    rows_BN = torch.where(kept_rows_BN >= 0, rows_BN1[:, 1:], num_rows)
    behind_N = torch.arange(kept_rows_BN.shape[1], device=starts_W1.device)
    positions_BN = (contexts_W + causal_W)[work_B][:, None] + behind_N
    drafts_BN = texts_W[work_B][:, None] * window + positions_BN % window
    places_T = pad(places_T, (0, 1)).scatter(0, rows_BN.flatten(), drafts_BN.flatten())
    return StatePlaces(places_T[:num_rows], last_rows_W, places_T[last_rows_W])


def copy_rows(
    to_ND: Tensor, places_R: Tensor | None, from_TD: Tensor, rows_R: Tensor | None = None
) -> None:
    """Copy rows of numbers to their places: to_ND[places_R[r]] = from_TD[rows_R[r]].

    A row with place -1 goes to the last place, or nowhere. Row -1 stands for any numbers.

    Args:
        to_ND, from_TD: of one dtype; to_ND is contiguous.
        places_R, rows_R: int64; no place but -1 occurs twice. One of them may be None: all in
            order.
    """
    from_RD = from_TD if rows_R is None else from_TD[rows_R]
    # Place -1 is the last one, and so is row -1.
    to_ND[slice(None) if places_R is None else places_R] = from_RD


def read_token_ids(
    texts_SL: Tensor, drafts_BN: Tensor, state_index_T: Tensor, draft_index_T: Tensor
) -> Tensor:
    """Read the tokens of rows from the texts, or from the drafts: int64 [T], new.

    A place that nothing was drafted for (-1) reads as 0: nothing matches it.

    Args:
        texts_SL, drafts_BN: int64, contiguous; N may be 0.
        state_index_T, draft_index_T: int64, as in RowBatch.
    """
    ids_T = texts_SL.view(-1)[state_index_T]
    if drafts_BN.numel() == 0:
        return ids_T
    drafted_T = drafts_BN.view(-1)[draft_index_T.clamp_min(0)].clamp_min(0)
    return torch.where(draft_index_T >= 0, drafted_T, ids_T)


def append_token_ids(
    texts_SL: Tensor, state_rows_B: Tensor, starts_B: Tensor, token_ids_BN: Tensor
) -> None:
    """Write emitted tokens, padded with -1, after the first tokens of texts.

    The texts change. Their last column takes writes that must go nowhere.

    Args:
        texts_SL: int64, contiguous.
        state_rows_B: int64; the row of each request's text.
        starts_B: int64; the number of tokens that stay.
        token_ids_BN: int64, contiguous; its tokens fit into the text.
    """
    places_N = torch.arange(token_ids_BN.shape[1], device=token_ids_BN.device)
    columns_BN = starts_B[:, None] + places_N
    columns_BN = torch.where(token_ids_BN >= 0, columns_BN, texts_SL.shape[1] - 1)
    texts_SL[state_rows_B[:, None], columns_BN] = token_ids_BN


def place_level(
    ancestors_BF: Tensor, first_row: int, num_drafts_B: Tensor, start: DraftStart
) -> tuple[Tensor, Tensor, Tensor]:
    """Place one level of growing trees, whose rows are kept after what a network has read.

    ancestors_T, positions_T and slots_T as in AttentionMetadata, new, T = B * F. A row for which
    its request has no slot is kept nowhere, and no row sees it. Its position follows from what it
    sees, as that of any other row.

    Args:
        ancestors_BF: int64; bit j: the row continues drafted row j, or is it.
        first_row: number of the level's first row; the others follow it.
        num_drafts_B: int64; slots after what was read that belong to each request.
        start: where the network stands; its table of blocks is contiguous.
    """
    width, contexts_B, block_size = ancestors_BF.shape[1], start.contexts_B, start.block_size
    places_F = torch.arange(first_row, first_row + width, device=contexts_B.device)
    has_slot_BF = places_F < num_drafts_B[:, None]
    index_BF = torch.where(has_slot_BF, contexts_B[:, None] + places_F, 0)
    blocks_BF = start.block_table_BP.gather(1, index_BF // block_size)
    slots_BF = blocks_BF.long() * block_size + index_BF % block_size
    own_BF = ancestors_BF & ((1 << num_drafts_B) - 1)[:, None]
    num_seen_BF = (own_BF[:, :, None] >> torch.arange(63, device=own_BF.device) & 1).sum(2)
    positions_BF = contexts_B[:, None] - 1 + num_seen_BF
    slots_BF = torch.where(has_slot_BF, slots_BF, -1)
    return own_BF.flatten(), positions_BF.flatten(), slots_BF.flatten()
