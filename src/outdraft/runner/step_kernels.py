# pyright: basic
# ruff: noqa: ANN001, ANN201
# numba infers the types of these functions and specialises on them.
"""The compiled host side of a step's rows, and of what the device state does on a CPU.

Dimension key: W works, B those that sample, N most drafts, T rows, R rows that need logits,
S state rows, L tokens.
"""

from outdraft.core.jit import njit


@njit(cache=True)
def index_rows(
    query_start_W1,
    num_causal_W,
    positions_T,
    slots_T,
    samples_W,
    state_rows_W,
    row_len,
    state_index_T,
    draft_index_T,
    logit_rows_R,
    root_rows_B,
    draft_slots_BN,
):
    """Fill the last five, as StepRows documents them."""
    num_sampling, num_logits = 0, 0
    width = draft_slots_BN.shape[1]
    for work in range(len(num_causal_W)):
        start, end = query_start_W1[work], query_start_W1[work + 1]
        first_draft = start + num_causal_W[work]
        for row in range(start, first_draft):
            state_index_T[row] = state_rows_W[work] * row_len + positions_T[row]
            draft_index_T[row] = -1
        for row in range(first_draft, end):
            state_index_T[row] = 0
            draft_index_T[row] = num_sampling * width + row - first_draft
        if not samples_W[work]:
            continue
        root_rows_B[num_sampling] = first_draft - 1
        for row in range(first_draft - 1, end):
            logit_rows_R[num_logits] = row
            num_logits += 1
        for place in range(width):
            row = first_draft + place
            draft_slots_BN[num_sampling, place] = slots_T[row] if row < end else -1
        num_sampling += 1


@njit(cache=True)
def shape_rows(parents_BN, draft_index_T, positions_T, ancestors_T):
    """Drafted rows get position and ancestors from their parents; the others stay."""
    width = parents_BN.shape[1]
    for row in range(len(draft_index_T)):
        index = draft_index_T[row]
        if index < 0:
            continue
        place = index % width
        up = parents_BN[index // width, place]  # 0: the root
        above = row - place - 1 + up
        positions_T[row] = positions_T[above] + 1
        ancestors = ancestors_T[above] if up > 0 else 0
        ancestors_T[row] = ancestors | (1 << place)


@njit(cache=True)
def read_token_ids(texts_SL, drafts_BN, state_index_T, draft_index_T, ids_T):
    """ids = what the indices point at in the texts, or in the drafts, both as if flat."""
    row_len, width = texts_SL.shape[1], drafts_BN.shape[1]
    for row in range(len(ids_T)):
        index = draft_index_T[row]
        if index >= 0:
            # A place that nothing was drafted for reads any token: nothing can match it.
            ids_T[row] = max(0, drafts_BN[index // width, index % width])
        else:
            index = state_index_T[row]
            ids_T[row] = texts_SL[index // row_len, index % row_len]


@njit(cache=True)
def append_token_ids(texts_SL, state_rows_B, starts_B, token_ids_BN):
    """Write emitted tokens, padded with -1, behind the first starts_B of each text."""
    for b in range(len(state_rows_B)):
        for place in range(token_ids_BN.shape[1]):
            token_id = token_ids_BN[b, place]
            if token_id >= 0:
                texts_SL[state_rows_B[b], starts_B[b] + place] = token_id
