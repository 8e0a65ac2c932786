"""Prompt lookup by scanning lists: the slow twin of `outdraft.drafting.host.ngram`."""

from tests.reference.brute_tree import Path, Tree, grow


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


class BruteNgramTree:
    """The same with branches: what followed several matches, merged."""

    def __init__(self, min_n: int, max_n: int, branching: int) -> None:
        self.min_n, self.max_n, self.branching = min_n, max_n, branching
        self.history: dict[int, list[bool]] = {}
        self.followers: list[list[int]] = []  # what followed each match, the newest first
        self.n = 0
        self.seen = 0

    def propose(self, tokens: list[int], max_tokens: int) -> Tree:
        self._judge(tokens[self.seen :])
        self.seen = len(tokens)
        self._look_up(tokens, max_tokens)
        judged = self.history.get(self.n, [])
        rate = (1 + sum(judged)) / (2 + len(judged))

        def children(path: Path) -> list[tuple[int, float]]:
            behind = [f[: len(path) + 1] for f in self.followers if len(f) > len(path)]
            behind = [f for f in behind if tuple(f[:-1]) == path]
            following = [f[-1] for f in behind]
            most_first = sorted(dict.fromkeys(following), key=lambda t: -following.count(t))
            return [(t, rate * (following.count(t) / len(following))) for t in most_first]

        return grow(children, max_tokens, max_tokens)

    def _judge(self, truth: list[int]) -> None:
        for end in range(1, len(truth) + 1):
            right_so_far = [f for f in self.followers if f[: end - 1] == truth[: end - 1]]
            if all(len(f) < end for f in right_so_far):
                break
            is_right = any(f[:end] == truth[:end] for f in right_so_far)
            self.history.setdefault(self.n, []).append(is_right)
            if not is_right:
                break

    def _look_up(self, tokens: list[int], max_tokens: int) -> None:
        for n in range(self.max_n, self.min_n - 1, -1):
            ends = range(len(tokens) - 1, n - 1, -1)
            suffix = tokens[len(tokens) - n :]
            matches = [end for end in ends if tokens[end - n : end] == suffix]
            if matches:
                newest = matches[: self.branching]
                self.followers = [tokens[end : end + max_tokens] for end in newest]
                self.n = n
                return
        self.followers, self.n = [], 0
