"""Where rows stand, row by row."""

import numpy as np

from outdraft.kernels.ops import PlacedRows


def place_rows(
    context_lens_B: np.ndarray,
    num_causal_B: np.ndarray,
    num_drafts_B: np.ndarray,
    parents_K: np.ndarray,
    block_table_BP: np.ndarray,
    block_size: int,
) -> PlacedRows:
    """As `ops.PlaceRows`."""
    starts, ancestors, positions, slots = [0], list[int](), list[int](), list[int]()
    parents = iter(parents_K.tolist())
    counts = zip(context_lens_B.tolist(), num_causal_B.tolist(), num_drafts_B.tolist(), strict=True)
    for blocks, (context_len, num_causal, num_drafts) in zip(block_table_BP, counts, strict=True):
        root = len(positions) + num_causal - 1
        positions += range(context_len, context_len + num_causal)
        ancestors += [0] * num_causal
        for place in range(num_drafts):
            above = root + next(parents)
            positions.append(positions[above] + 1)
            ancestors.append(ancestors[above] | 1 << place)
        for index in range(context_len, context_len + num_causal + num_drafts):
            slots.append(int(blocks[index // block_size]) * block_size + index % block_size)
        starts.append(len(positions))
    return PlacedRows(
        np.array(starts, dtype=np.int32),
        np.array(ancestors, dtype=np.int64),
        np.array(positions, dtype=np.int64),
        np.array(slots, dtype=np.int64),
    )
