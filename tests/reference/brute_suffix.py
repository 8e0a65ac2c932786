"""Suffix decoding without branches, by scanning lists."""


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
