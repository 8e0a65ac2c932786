"""Suffix decoding by scanning lists: the slow twin of `outdraft.drafting.host.suffix`."""

from tests.reference.brute_tree import Path, Tree, grow


def occurrences(text: list[int], string: list[int]) -> list[int]:
    """Where a string starts in a text."""
    last = len(text) - len(string)
    return [i for i in range(last + 1) if text[i : i + len(string)] == string]


def continuations(texts: list[list[int]], string: list[int]) -> dict[int, tuple[int, int]]:
    """Token -> (how often it follows the string, its last place in all texts laid end to end)."""
    found: dict[int, tuple[int, int]] = {}
    base = 0
    for text in texts:
        for start in occurrences(text[:-1], string):
            token = text[start + len(string)]
            count, _ = found.get(token, (0, 0))
            found[token] = (count + 1, base + start)
        base += len(text)
    return found


def follow(
    texts: list[list[int]], match: list[int], limit: int, min_prob: float, seen: int
) -> tuple[list[int], float]:
    """The greedy path behind a match that has been seen `seen` times."""
    draft: list[int] = []
    prob, score = 1.0, 0.0
    while len(draft) < limit:
        found = continuations(texts, match + draft)
        if not found:
            break
        token = max(found, key=lambda t: found[t])  # most often, then latest
        prob *= found[token][0] / seen
        if prob < min_prob:
            break
        draft.append(token)
        score += prob
        seen = found[token][0]
    return draft, score


def speculate(
    context: list[int],
    texts: list[list[int]],
    max_tokens: int,
    depth: int,
    factor: float,
    min_prob: float,
) -> tuple[list[int], float]:
    """The draft of the best score over all match lengths; the longest match among equals.

    The context itself is either one of the texts, or counts as one occurrence more.
    """
    best: tuple[list[int], float] = ([], 0.0)
    for match_len in range(min(len(context), depth - 1), 0, -1):
        match = context[len(context) - match_len :]
        seen = sum(len(occurrences(text, match)) for text in texts)
        if all(text is not context for text in texts):
            seen += 1
        limit = min(max_tokens, int(factor * match_len), depth - match_len)
        draft, score = follow(texts, match, limit, min_prob, seen)
        if score > best[1]:
            best = (draft, score)
    return best


def speculate_tree(
    context: list[int],
    texts: list[list[int]],
    max_tokens: int,
    depth: int,
    factor: float,
    min_prob: float,
    branching: int,
) -> Tree:
    """The same with branches: every string may be followed by its most frequent continuations.

    If several matches occur at the same places, the one that may draft deepest counts.
    """
    best: Tree = ([], [], 0.0)
    best_seen, best_limit = 0, 0
    is_own = any(text is context for text in texts)
    for match_len in range(min(len(context), depth - 1), 0, -1):
        match = context[len(context) - match_len :]

        def children(path: Path, match: list[int] = match) -> list[tuple[int, float]]:
            string = [*match, *path]
            found = continuations(texts, string)
            most_first = sorted(found, key=lambda t: found[t], reverse=True)[:branching]
            seen = sum(len(occurrences(text, string)) for text in texts)
            if not path and not is_own:
                seen += 1
            return [(token, found[token][0] / seen) for token in most_first]

        seen = sum(len(occurrences(text, match)) for text in texts)
        limit = min(int(factor * match_len), depth - match_len)
        tree = grow(children, max_tokens, limit, min_prob)
        is_deeper = seen == best_seen and limit > best_limit
        if tree[2] > best[2] or (tree[2] == best[2] and is_deeper):
            best, best_seen, best_limit = tree, seen, limit
    return best
