"""Trees of the most probable paths, by looking at every path: the slow twin of spec.best_first."""

from collections.abc import Callable

Path = tuple[int, ...]
Tree = tuple[list[int], list[int], float]  # token ids, parents, sum of the paths' probabilities


def grow(
    children: Callable[[Path], list[tuple[int, float]]],
    max_rows: int,
    max_depth: int,
    min_prob: float = 0.0,
) -> Tree:
    """Add the most probable path that continues one of the tree, again and again.

    `children` lists what may follow a path and how probable that is, the likeliest first. Among
    equals the longest path comes first, then the earliest parent's, then the first child.
    """
    paths: list[Path] = [()]
    probs = [1.0]
    parents: list[int] = []
    while len(parents) < max_rows:
        options = [
            (probs[row] * share, len(path), -row, -rank, token)
            for row, path in enumerate(paths)
            for rank, (token, share) in enumerate(children(path))
            if (*path, token) not in paths and len(path) < max_depth
        ]
        options = [option for option in options if option[0] >= min_prob]
        if not options:
            break
        prob, _, minus_row, _, token = max(options)
        paths.append((*paths[-minus_row], token))
        probs.append(prob)
        parents.append(-minus_row)
    score = 0.0
    for prob in probs[1:]:
        score += prob
    return [path[-1] for path in paths[1:]], parents, score
