"""The replica that a request goes to, and the number of replicas. No clock, no network.

A request goes to the replica with the beginning of its prompt, unless that is overfull. What a
replica has in its prefix cache is guessed from what it was sent, by the names of blocks that the
cache itself uses (`kv.block_pool`).
"""

import math
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from outdraft.config.engine import EngineConfig

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
        """A replica takes no more requests, if it did; what it still has is no longer counted."""
        self._replicas.pop(replica, None)

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
        replica = self._replicas[chosen]
        self._turn += 1
        replica.turn = self._turn
        left_tokens = max(0, num_tokens - known[chosen] * self._block_size)
        replica.load_tokens += left_tokens
        replica.remember(hashes, self._max_blocks)
        return Route(chosen, known[chosen], left_tokens)

    def settle(self, route: Route, num_tokens: int) -> None:
        """`num_tokens` of a request were computed."""
        settled = min(num_tokens, route.left_tokens)
        route.left_tokens -= settled
        if (replica := self._replicas.get(route.replica)) is not None:
            replica.load_tokens -= settled

    def end(self, route: Route) -> None:
        """A request has ended, however it did."""
        self.settle(route, route.left_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """The number of replicas, and what each one needs.

    Attributes:
        num_replicas: at the start.
        min_replicas, max_replicas: how many there may be; both are `num_replicas` without
            autoscaling.
        target_requests: outstanding ones a replica, at which autoscaling aims.
        upscale_delay_s, downscale_delay_s: for which more or fewer are wanted before it acts.
        num_cpus, num_gpus: that Ray reserves for a replica.
        environ: variables of the engine's process, beside those of its machine.
        drain_timeout_s: that a replica's requests have to end when it is not needed any more.
    """

    num_replicas: int
    min_replicas: int
    max_replicas: int
    target_requests: float
    num_cpus: float
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    num_gpus: float = 0
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    log_level: str = "INFO"
    drain_timeout_s: float = 30.0


def config_of_replica(config: EngineConfig, name: str) -> EngineConfig:
    """The configuration of the replica that has this name: with a seed of its own.

    With a common one, the first requests of all replicas would draw the same noise: prompts that
    are alike would get the same texts, at any temperature.
    """
    digest = blake2b(repr((config.seed, name)).encode(), digest_size=7).digest()
    return replace(config, seed=int.from_bytes(digest, "little"))


def num_wanted(outstanding: Sequence[float], num_replicas: int, target: float) -> int:
    """The number of replicas for `target` outstanding requests each; at least 1.

    Args:
        outstanding: requests of each replica that has reported.
        num_replicas: that run; those that have not reported yet count as the mean of the others.
    """
    if not outstanding:
        return max(1, num_replicas)
    mean = sum(outstanding) / len(outstanding)
    # A sum of means need not be whole where it should be.
    return max(1, math.ceil(round(mean * max(num_replicas, len(outstanding)) / target, 6)))
