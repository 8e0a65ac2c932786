"""What rows of a draft are to each other, from their parents alone."""

from collections.abc import Sequence


def tree_depths(parents: Sequence[int]) -> list[int]:
    """Depth of each drafted row below the root, at least 1; `parents` as in Draft."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    return depths[1:]


def ancestor_masks(parents: Sequence[int]) -> list[int]:
    """Per drafted row, the bits of the drafted rows it sees: its ancestors and itself."""
    masks = [0]
    for row, parent in enumerate(parents):
        masks.append(masks[parent] | 1 << row)
    return masks[1:]
