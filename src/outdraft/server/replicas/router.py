"""Sends a request to the replica with the beginning of its prompt, unless that is overfull.

Plain Python: no clock, no network. What a replica has in its prefix cache is guessed from what it
was sent, by the names of blocks that the cache itself uses (`kv.block_pool`).
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

SLACK_TOKENS = 4096
MAX_BLOCKS = 65_536  # a replica's blocks that are remembered: a million tokens in blocks of 16


@dataclass(slots=True)
class Route:
    """A request's way to a replica, until it ends.

    Attributes:
        num_matched: blocks of the prompt that the replica was sent before.
        left_tokens: what the replica still has to compute for it.
    """

    replica: str
    num_matched: int
    left_tokens: int


@dataclass(slots=True)
class _ReplicaLoad:
    load_tokens: int = 0
    turn: int = 0  # of the router, when a request was last sent here
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])

    def num_known(self, hashes: Sequence[bytes]) -> int:
        """Number of the first blocks that it has."""
        return next((i for i, one in enumerate(hashes) if one not in self.blocks), len(hashes))

    def remember(self, hashes: Sequence[bytes], max_blocks: int) -> None:
        for one in reversed(hashes):  # what prompts share, their beginnings, is forgotten last
            self.blocks[one] = None
            self.blocks.move_to_end(one)
        while len(self.blocks) > max_blocks:
            self.blocks.popitem(last=False)


class PrefixRouter:
    """Knows the replicas, what they were sent, and what they have left to compute.

    A request goes to the replica that knows most of its prompt's blocks. It goes to the replica
    with the least left to compute if none knows any, or if the preferred one has more to compute
    than twice that of the least loaded one and `slack_tokens`.

    `block_size`: tokens of a block; `max_blocks`: that are remembered, by replica.
    """

    def __init__(
        self, block_size: int, slack_tokens: int = SLACK_TOKENS, max_blocks: int = MAX_BLOCKS
    ) -> None:
        self._block_size = block_size
        self._slack_tokens = slack_tokens
        self._max_blocks = max_blocks
        self._replicas: dict[str, _ReplicaLoad] = {}
        self._turn = 0

    @property
    def replicas(self) -> Collection[str]:
        return self._replicas.keys()

    def load_tokens(self, replica: str) -> int:
        """Tokens that a replica has left to compute."""
        return self._replicas[replica].load_tokens

    def join(self, replica: str) -> None:
        """A replica is there. It knows nothing yet."""
        assert replica not in self._replicas
        self._replicas[replica] = _ReplicaLoad()

    def leave(self, replica: str) -> None:
        """A replica takes no more requests; what it still has is no longer counted."""
        del self._replicas[replica]

    def route(
        self, hashes: Sequence[bytes], num_tokens: int, avoided: Collection[str] = ()
    ) -> Route | None:
        """Send a request to a replica; None: there is none.

        Args:
            hashes: names of the prompt's full blocks, from its beginning.
            num_tokens: to be computed for it by a replica that knows none of them.
            avoided: replicas that get it only if there are no others.
        """
        names = [name for name in self._replicas if name not in avoided] or list(self._replicas)
        if not names:
            return None
        known = {name: self._replicas[name].num_known(hashes) for name in names}

        def burden(name: str) -> tuple[int, int, int]:
            replica = self._replicas[name]
            return replica.load_tokens, -known[name], replica.turn

        chosen = min(names, key=burden)
        preferred = min(names, key=lambda name: (-known[name], *burden(name)))
        most_tokens = 2 * self.load_tokens(chosen) + self._slack_tokens
        if known[preferred] and self.load_tokens(preferred) <= most_tokens:
            chosen = preferred
        return self._send(chosen, hashes, num_tokens, known[chosen])

    def settle(self, route: Route, num_tokens: int) -> None:
        """`num_tokens` of a request were computed."""
        settled = min(num_tokens, route.left_tokens)
        route.left_tokens -= settled
        if (replica := self._replicas.get(route.replica)) is not None:
            replica.load_tokens -= settled

    def end(self, route: Route) -> None:
        """A request has ended, however it did."""
        self.settle(route, route.left_tokens)

    def _send(self, name: str, hashes: Sequence[bytes], num_tokens: int, num_known: int) -> Route:
        replica = self._replicas[name]
        self._turn += 1
        replica.turn = self._turn
        left_tokens = max(0, num_tokens - num_known * self._block_size)
        replica.load_tokens += left_tokens
        replica.remember(hashes, self._max_blocks)
        return Route(name, num_known, left_tokens)
