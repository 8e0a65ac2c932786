"""Facts for the controller before and after a step: plain data.

A request says which sources could draft for it now; core/decision.py is the answer.
Times are seconds, lengths are tokens, a level is a depth of a draft (the first one is 1).
"""

from bisect import bisect_right
from itertools import accumulate

from msgspec import Struct

from outdraft.core.decision import CHAIN, Decision, Shape, rows_of


class HostOffer(Struct, frozen=True):
    """A draft that a source of the host has; it was not drawn from probabilities.

    Attributes:
        length: levels, at least 1; no more than the request may have of this source.
        match_length: tokens of the text that the source found again.
        shape: rows of each level; CHAIN: one each.
    """

    source: str
    length: int
    match_length: int
    shape: Shape = CHAIN


class RequestFacts(Struct, frozen=True):
    """A request that samples in this step, as it stands before it.

    Attributes:
        max_tokens: most tokens still to come, at least 1.
        max_drafts: most rows of a network's draft that it may have; 0: it must not draft.
        context_tokens: tokens that its newest token attends to.
        offers: drafts that sources of the host have for it.
        network: the network that may draft for it.
        rule: how its drafts are verified; acceptance is learned for each rule apart.
        shapes: of the network's drafts, the configured one first; all drafts of a step have one.
        max_chain: most levels of its chains.
        unread_tokens: settled tokens that the network has not read, beyond those of a usual step.
        can_stop: whether the network ends a chain by its own confidence.
    """

    request_id: str
    max_tokens: int
    max_drafts: int
    context_tokens: int
    offers: tuple[HostOffer, ...] = ()
    network: str | None = None
    rule: str = ""
    shapes: tuple[Shape, ...] = (CHAIN,)
    unread_tokens: int = 0
    can_stop: bool = True
    max_chain: int = 1 << 30

    @property
    def most_rows(self) -> int:
        """The most that any draft may have."""
        if not self.offers or not self.max_drafts:
            return self.max_drafts
        return max(self.max_drafts, *(rows_of(offer.shape, offer.length) for offer in self.offers))

    def most_levels(self, shape: Shape) -> int:
        """Levels of a network's draft that there are rows and tokens left for."""
        most = min(self.max_drafts, self.max_tokens - 1)
        if not shape:
            return max(0, min(most, self.max_chain))
        ends = list(accumulate(shape[: max(0, self.max_tokens - 1)]))
        return bisect_right(ends, self.max_drafts)


class StepFacts(Struct, frozen=True):
    """One step before it begins.

    Attributes:
        requests: in batch order; all of them get one token at least.
        prompt_rows: rows of prompts that the step reads beside them; the prefix cache may save
            some.
        free_rows: rows that drafts may have, beside those that running requests need.
        free_slots: places in the KV cache that drafts may have, in the same way.
    """

    requests: tuple[RequestFacts, ...]
    prompt_rows: int = 0
    free_rows: int = 1 << 30
    free_slots: int = 1 << 30

    @property
    def has_offers(self) -> bool:
        return any(one.offers for one in self.requests)

    @property
    def max_rows(self) -> int:
        return min(self.free_rows, self.free_slots)


class DraftOutcome(Struct, frozen=True):
    """The outcome of a granted draft.

    Attributes:
        drafted: levels that were verified.
        accepted: levels that were accepted.
        margins: a network's, level by level; one more than `drafted` if the live rule ended it, or
            its cap on rows.
    """

    request_id: str
    drafted: int
    accepted: int
    margins: tuple[float, ...] = ()


class ShadowOutcome(Struct, frozen=True):
    """A draft that was not verified, compared with the text that came."""

    source: str
    match_length: int
    drafted: int
    accepted: int


class StepOutcome(Struct, frozen=True):
    """One step when it is over.

    Attributes:
        facts: the input of the decision.
        decision: the one that the engine acted on.
        num_rows: rows that the target read, prompts included.
        num_tokens: tokens that were emitted.
        draft_s, target_s, host_s: time of each phase; catching up is part of drafting.
        deciding_s: time to look for offers, to decide, and to learn from the step before;
            no part of `host_s`.
        is_held: the decision was made some steps earlier, and so were the facts.
    """

    facts: StepFacts
    decision: Decision
    drafts: tuple[DraftOutcome, ...]
    num_rows: int
    num_tokens: int
    draft_s: float
    target_s: float
    host_s: float
    shadows: tuple[ShadowOutcome, ...] = ()
    deciding_s: float = 0.0
    is_held: bool = False
