"""A draft of the most probable paths, which is expected to be accepted furthest."""

from collections.abc import Callable

from outdraft.core.draft import Draft

Path = tuple[int, ...]  # the token ids from the root, which is ()


def grow(
    children: Callable[[Path], list[tuple[int, float]]],
    max_rows: int,
    max_depth: int,
    min_prob: float = 0.0,
) -> Draft:
    """Add the most probable path that continues one of the tree, again and again.

    A path's probability is the product along it, and the draft's score is the sum over its paths.
    Among equals the longest path comes first, then the earliest parent's, then the first child. So
    the first K rows are the best tree of K rows, for every K.

    Args:
        children: what may follow a path, and how probable that is, the likeliest first.
        min_prob: of a path.
    """
    paths: list[Path] = [()]
    probs = [1.0]
    parents: list[int] = []
    waiting: list[tuple[float, int, int, int, int]] = []
    while True:
        row = len(parents)
        if len(paths[row]) < max_depth:
            for rank, (token, share) in enumerate(children(paths[row])):
                prob = probs[row] * share
                if prob >= min_prob:
                    waiting.append((prob, len(paths[row]), -row, -rank, token))
        if len(parents) == max_rows or not waiting:
            break
        best = max(waiting)
        waiting.remove(best)
        prob, _, minus_row, _, token = best
        paths.append((*paths[-minus_row], token))
        probs.append(prob)
        parents.append(-minus_row)
    score = 0.0
    for prob in probs[1:]:
        score += prob
    return Draft(tuple(path[-1] for path in paths[1:]), tuple(parents), score)
