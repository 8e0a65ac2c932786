"""A step's decision and its reason: they steer the engine and appear in metrics and traces."""

from dataclasses import dataclass
from enum import StrEnum

from msgspec import Struct

Shape = tuple[int, ...]  # rows of each level
CHAIN: Shape = ()  # one row a level, as many levels as are granted
NO_CAP = 1 << 30  # rows


def rows_of(shape: Shape, num_levels: int) -> int:
    """Rows of the first levels."""
    return sum(shape[:num_levels]) if shape else num_levels


class Reason(StrEnum):
    """Why a step drafts as it does."""

    GAIN = "gain"  # drafts bring more tokens a second
    NO_GAIN = "no_gain"  # no draft would bring more tokens a second
    NOTHING_OFFERED = "nothing_offered"  # no source can draft
    NO_ROOM = "no_room"  # no rows or slots are free
    NETWORK_PROBE = "network_probe"  # plain decoding, but the network is tried on a few requests
    PLAIN_PROBE = "plain_probe"  # drafts pay, but this step measures plain decoding
    DISABLED = "disabled"  # more requests run than may speculate
    NOT_WANTED = "not_wanted"  # no request may draft, or none wants to


class LiveStop(Struct, array_like=True, frozen=True):
    """A rule that ends a network's chain early; its numbers come from finished steps.

    Level i is drafted if all levels above it were, and if the product of

        sigmoid(weights[j] * margin_j + biases[j])    over the levels j <= i

    is at least the price. The margin of a level is the distance between its two largest logits as
    the level's token is drawn from them: after all that a request's parameters change, temperature
    and cuts included (at temperature 0 there is neither), but before any noise. It is at most
    MAX_MARGIN, and equal to it where only one token has mass. A network with a head for it gives
    log-odds instead, from the row of the level and the token above it. Either is known before the
    token is drawn, and a decision is never taken back. That makes such lengths exact: see
    docs/design/0012.

    Attributes:
        weights, biases: of each level that the network drafts, the first one first.
        price: of finished steps.
        row_cap: most rows of all drafts of the step. The network's rows count level by level, in
            batch order within a level, after those of the host. A request with such a rule ends
            where there is no row left.
    """

    weights: tuple[float, ...]
    biases: tuple[float, ...]
    price: float
    row_cap: int = NO_CAP

    @property
    def may_end(self) -> bool:
        """False: it only looks."""
        return self.price > 0 or self.row_cap < NO_CAP

    def __post_init__(self) -> None:
        if len(self.weights) != len(self.biases):
            raise ValueError(f"{len(self.weights)} weights but {len(self.biases)} biases")


class Grant(Struct, frozen=True):
    """The drafts that one request may make in this step.

    Attributes:
        levels: most levels. The live rule may end a network's chain earlier.
        rows: most rows; the scheduler reserves them.
        match_length: tokens of the text that a source of the host found again.
        rule: how it is verified; acceptance is learned for each rule apart.
        stop: the live rule; None: draft all levels, and report no margins.
    """

    request_id: str
    source: str
    levels: int
    rows: int
    match_length: int = 0
    rule: str = ""
    shape: Shape = CHAIN
    stop: LiveStop | None = None


class Decision(Struct, frozen=True):
    """The plan of a step's speculation, and its reason.

    Attributes:
        grants: of requests that draft, in batch order; the others draft nothing.
        price: a network's chain goes on while its live survival is at least this, in accepted
            tokens a row; None: no request drafts, or lengths are fixed.
        draft_s, target_s, host_s: predicted time by phase; the target's contains sampling.
        plain_s: predicted time of the step without drafts; 0: nothing is predicted.
        tokens: predicted number of tokens, those of plain decoding included.
        gain: predicted tokens a second against plain decoding, minus 1, prompts left aside.
        shadows: ids of requests; their unused offers are to be compared with the coming text.
        catch_up_s: the part of draft_s in which networks read tokens that they have not read. If
            the decision holds for several steps, only the first one takes it.
    """

    reason: Reason
    grants: tuple[Grant, ...] = ()
    price: float | None = None
    draft_s: float = 0.0
    target_s: float = 0.0
    host_s: float = 0.0
    plain_s: float = 0.0
    tokens: float = 0.0
    gain: float = 0.0
    shadows: tuple[str, ...] = ()
    catch_up_s: float = 0.0

    @property
    def is_predicted(self) -> bool:
        return self.plain_s > 0

    @property
    def step_s(self) -> float:
        return self.draft_s + self.target_s + self.host_s


class AlarmKind(StrEnum):
    """The possible faults of a source of drafts."""

    ACCEPTANCE_FELL = "acceptance_fell"
    NEVER_DRAFTS = "never_drafts"
    NONE_ACCEPTED = "none_accepted"


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm begins, or ends.

    Attributes:
        is_on: whether it begins.
        evidence: the figures that it rests on, as a sentence.
    """

    kind: AlarmKind
    source: str
    is_on: bool
    evidence: str
