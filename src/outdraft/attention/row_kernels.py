# pyright: basic
# ruff: noqa: ANN001, ANN201
# numba infers the types of these functions and specialises on them.
"""The compiled half of rows.py: at a few rows, a dozen numpy calls would cost more than the rows.

Dimension key: B requests, T rows, P blocks, K drafted rows of all requests, or drafts of one.
"""

from outdraft.core.jit import njit


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
