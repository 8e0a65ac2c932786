"""What a simulator's engine is like: its costs, how drafts fare, and the requests that come."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from outdraft.control.costs import CostTable
from outdraft.core.decision import Shape

NETWORK = "network"  # the source of a simulated network's drafts


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How likely the target accepts, by level and at the middle margin and for a middle request.

    Attributes:
        chances: by level; the last one holds for deeper levels.
        offsets: in logits, by request in turn: which are easier than others.
        margin_weight: logits by unit of the margin.
    """

    chances: tuple[float, ...]
    offsets: tuple[float, ...] = (0.0,)
    margin_weight: float = 0.0

    def logit(self, level: int, request: int) -> float:
        chance = self.chances[min(level, len(self.chances) - 1)]
        chance = min(max(chance, 1e-6), 1 - 1e-6)
        return math.log(chance / (1 - chance)) + self.offsets[request % len(self.offsets)]


@dataclass(frozen=True, slots=True)
class HostTruth:
    """A source of the host.

    Attributes:
        rate: share of the places in a text at which it finds a match.
        chances: of each of its tokens, by the match's bucket of doubling lengths.
        match_lengths: that it finds, equally often.
    """

    rate: float
    chances: tuple[float, ...]
    match_lengths: tuple[int, ...] = (2, 4, 8)
    source: str = "suffix"

    def chance(self, match_length: int) -> float:
        return self.chances[min(match_length.bit_length() - 1, len(self.chances) - 1)]


@dataclass(frozen=True, slots=True)
class Load:
    """Requests: as many as `concurrency` run, and each that ends makes room for the next.

    Attributes:
        output_tokens: of each request, in turn.
        prompt_tokens: of each; read in chunks beside the others' steps.
    """

    concurrency: int
    output_tokens: tuple[int, ...] = (1 << 30,)
    prompt_tokens: int = 0
    chunk_rows: int = 256


@dataclass(frozen=True, slots=True)
class World:
    """What is true, at one step of the simulation.

    Attributes:
        table: what steps take.
        target_factor, draft_factor: on the table's times, as machines slow down and speed up.
        network: of its chains; None: there is no network.
        tree: of the network's trees.
    """

    table: CostTable
    network: Acceptance | None = None
    host: HostTruth | None = None
    target_factor: float = 1.0
    draft_factor: float = 1.0
    tree: Acceptance | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load, and the world by step.

    Attributes:
        noise: standard deviation of the logarithm of a pass's time.
        window: most tokens that the network ever has to catch up with.
        tree: rows of each level of the network's trees; (): it drafts chains only.
    """

    load: Load
    world: Callable[[int], World]
    max_drafts: int
    seed: int = 0
    noise: float = 0.02
    window: int = 1 << 30
    tree: Shape = ()
