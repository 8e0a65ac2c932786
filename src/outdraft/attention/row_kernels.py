# pyright: basic
# ruff: noqa: ANN001, ANN201
# numba infers the types of these functions and specialises on them.
"""The compiled half of rows.py: at a few rows, a dozen numpy calls would cost more than the rows.

Dimension key: B requests, T rows, P blocks, K drafted rows of all requests, or drafts of one.
"""

from outdraft.core.jit import njit


@njit(cache=True)
def place_rows(
    context_lens_B,
    num_causal_B,
    num_drafts_B,
    parents_K,
    block_table_BP,
    block_size,
    query_start_B1,
    ancestors_T,
    positions_T,
    slots_T,
):
    """Fill the last four, as AttentionMetadata documents them."""
    row, first_parent = 0, 0
    for b in range(len(context_lens_B)):
        query_start_B1[b] = row
        num_causal, num_drafts = num_causal_B[b], num_drafts_B[b]
        first_draft = row + num_causal
        for k in range(num_causal + num_drafts):
            index = context_lens_B[b] + k
            block = index // block_size
            slots_T[row + k] = block_table_BP[b, block] * block_size + index - block * block_size
        for k in range(num_causal):
            positions_T[row + k] = context_lens_B[b] + k
            ancestors_T[row + k] = 0
        for k in range(num_drafts):
            up = first_draft - 1 + parents_K[first_parent + k]  # the root is the last causal row
            positions_T[first_draft + k] = positions_T[up] + 1
            ancestors_T[first_draft + k] = ancestors_T[up] | (1 << k)
        row = first_draft + num_drafts
        first_parent += num_drafts
    query_start_B1[len(context_lens_B)] = row


@njit(cache=True)
def place_extensions(
    lengths_B2, block_table_BP, block_size, positions_KB, read_KB, context_lens_KB, slots_KB
):
    """Fill the last four: K passes that draft one token each behind every text; all but the first
    read the draft before, and have a row in the last three.

    lengths_B2: tokens and wanted drafts of each request. A request that wants fewer than K drafts
    still has a row in each pass: its newest token, at a position that exists; nothing is kept.
    """
    for b in range(len(lengths_B2)):
        num_tokens, num_drafts = lengths_B2[b]
        for k in range(len(positions_KB)):
            positions_KB[k, b] = num_tokens + k
        for k in range(len(read_KB)):
            is_kept = k + 1 < num_drafts
            position = num_tokens + k if is_kept else num_tokens - 1
            block = position // block_size
            read_KB[k, b] = context_lens_KB[k, b] = position
            slot = block_table_BP[b, block] * block_size + position - block * block_size
            slots_KB[k, b] = slot if is_kept else -1
