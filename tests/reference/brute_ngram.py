"""Prompt lookup without branches, by scanning lists."""


def lookup(
    tokens: list[int], min_n: int, max_n: int, max_tokens: int
) -> tuple[list[int], int, int]:
    """The draft, where it was copied from, and the match length; ([], 0, 0) without a match."""
    for n in range(max_n, min_n - 1, -1):
        suffix = tokens[len(tokens) - n :]
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == suffix:
                end = start + n
                return tokens[end : end + max_tokens], end, n
    return [], 0, 0


class BruteNgram:
    """Proposals and scores at each step of one growing text."""

    def __init__(self, min_n: int, max_n: int) -> None:
        self.min_n, self.max_n = min_n, max_n
        self.history: dict[int, list[bool]] = {}  # match length -> was each judged token right?
        self.draft: list[int] = []
        self.n = 0
        self.seen = 0

    def propose(self, tokens: list[int], max_tokens: int) -> tuple[list[int], float]:
        for guess, truth in zip(self.draft, tokens[self.seen :], strict=False):
            self.history.setdefault(self.n, []).append(guess == truth)
            if guess != truth:
                break
        self.draft, _, self.n = lookup(tokens, self.min_n, self.max_n, max_tokens)
        self.seen = len(tokens)
        judged = self.history.get(self.n, [])
        right = (1 + sum(judged)) / (2 + len(judged))
        return self.draft, sum(right**j for j in range(1, len(self.draft) + 1))
