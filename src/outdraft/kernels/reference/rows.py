"""Where rows stand and which tokens they read: on the host row by row, else by tensors."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span
from outdraft.kernels.draft_ops import DraftStart
from outdraft.kernels.ops import PlacedRows


def place_rows(
    spans: Sequence[Span], extra: Sequence[Sequence[int]], block_size: int, width: int
) -> PlacedRows:
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
    starts_of = (starts, [span.context_len for span in spans], [span.num_causal for span in spans])
    flat = (ancestors, positions, slots, state_index, draft_index, logit_rows, root_rows)
    return PlacedRows(
        *(torch.tensor(each, dtype=torch.int32) for each in (*starts_of, blocks)),
        *(torch.tensor(each, dtype=torch.int64) for each in flat),
        draft_slots_BN=torch.tensor(draft_slots, dtype=torch.int64).view(len(root_rows), width),
        extra=tuple(torch.tensor(each, dtype=torch.int64) for each in extra),
    )


def shape_rows(
    parents_BN: Tensor, draft_index_T: Tensor, positions_T: Tensor, ancestors_T: Tensor
) -> tuple[Tensor, Tensor]:
    width, device = parents_BN.shape[1], parents_BN.device
    # Row 0 is the root, which is above itself; padding may hold anything.
    places_N = torch.arange(width, device=device)
    up_BN1 = pad(torch.minimum(parents_BN.clamp_min(0), places_N), (1, 0))
    depth_BN1 = pad(torch.ones_like(parents_BN), (1, 0))
    seen_BN1 = pad(1 << places_N, (1, 0)).expand_as(up_BN1)
    for _ in range(width.bit_length()):  # what is 1, 2, 4, ... levels above
        depth_BN1 = depth_BN1 + depth_BN1.gather(1, up_BN1)
        seen_BN1 = seen_BN1 | seen_BN1.gather(1, up_BN1)
        up_BN1 = up_BN1.gather(1, up_BN1)
    is_draft_T, index_T = draft_index_T >= 0, draft_index_T.clamp_min(0)
    rows_T = torch.arange(len(index_T), device=device)
    root_T = (rows_T - 1 - index_T % width).clamp_min(0)
    depth_T, seen_T = (one[:, 1:].flatten()[index_T] for one in (depth_BN1, seen_BN1))
    shaped_T = positions_T[root_T] + depth_T
    return (
        torch.where(is_draft_T, shaped_T, positions_T),
        torch.where(is_draft_T, seen_T, ancestors_T),
    )


def place_states(
    rows: AttentionMetadata,
    state_index_T: Tensor,
    root_rows_B: Tensor,
    kept_rows_BN: Tensor,
    row_len: int,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
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
        return places_T, last_rows_W, places_T[last_rows_W]
    work_B = work_T[root_rows_B]
    rows_BN1 = root_rows_B[:, None] + 1 + pad(kept_rows_BN, (1, 0), value=-1)
    last_rows_W = last_rows_W.index_copy(0, work_B, rows_BN1.amax(1))  # a path goes down
    # Refused drafts go to one row more, which is cut off.
    rows_BN = torch.where(kept_rows_BN >= 0, rows_BN1[:, 1:], num_rows)
    behind_N = torch.arange(kept_rows_BN.shape[1], device=starts_W1.device)
    positions_BN = (contexts_W + causal_W)[work_B][:, None] + behind_N
    drafts_BN = texts_W[work_B][:, None] * window + positions_BN % window
    places_T = pad(places_T, (0, 1)).scatter(0, rows_BN.flatten(), drafts_BN.flatten())
    return places_T[:num_rows], last_rows_W, places_T[last_rows_W]


def copy_rows(
    to_ND: Tensor, places_R: Tensor | None, from_TD: Tensor, rows_R: Tensor | None = None
) -> None:
    from_RD = from_TD if rows_R is None else from_TD[rows_R]
    # Place -1 is the last one, and so is row -1.
    to_ND[slice(None) if places_R is None else places_R] = from_RD


def read_token_ids(
    texts_SL: Tensor, drafts_BN: Tensor, state_index_T: Tensor, draft_index_T: Tensor
) -> Tensor:
    ids_T = texts_SL.view(-1)[state_index_T]
    if drafts_BN.numel() == 0:
        return ids_T
    drafted_T = drafts_BN.view(-1)[draft_index_T.clamp_min(0)].clamp_min(0)
    return torch.where(draft_index_T >= 0, drafted_T, ids_T)


def append_token_ids(
    texts_SL: Tensor, state_rows_B: Tensor, starts_B: Tensor, token_ids_BN: Tensor
) -> None:
    places_N = torch.arange(token_ids_BN.shape[1], device=token_ids_BN.device)
    columns_BN = starts_B[:, None] + places_N
    columns_BN = torch.where(token_ids_BN >= 0, columns_BN, texts_SL.shape[1] - 1)
    texts_SL[state_rows_B[:, None], columns_BN] = token_ids_BN


def place_level(
    ancestors_BF: Tensor, first_row: int, num_drafts_B: Tensor, start: DraftStart
) -> tuple[Tensor, Tensor, Tensor]:
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
