"""A policy of lengths that changes its mind at every step, and checks what it is told."""

import numpy as np
from msgspec import structs

from outdraft.config.speculation import NETWORK_SOURCES
from outdraft.control.facts import RequestFacts, StepFacts, StepOutcome
from outdraft.core.decision import Decision, Grant, LiveStop, Reason, Shape
from outdraft.core.draft import DraftSource

PLAIN = Decision(Reason.NO_GAIN, target_s=1.0, plain_s=1.0, tokens=1.0)


class ChangingLengths:
    """Random sources and levels for each request in each step, some without drafts."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._decided: Decision | None = None
        self._may_hold = False  # the decision names no draft of the host, which is used up
        self.lengths: set[tuple[str, int]] = set()  # that were verified, by source
        self.num_stopped = 0  # chains that a live rule ended
        self.num_mixed = 0  # steps in which requests drafted different levels
        self.num_observed = self.num_held = self.num_shadows = 0
        self.shapes: set[Shape] = set()  # of the network's drafts

    def network_due_in(self) -> int:
        return 0

    def hold(
        self, num_requests: int, prompt_rows: int = 0, *, may_offer: bool = False
    ) -> Decision | None:
        """Now and then the step is plain, or drafts as the last one did."""
        coin = self._rng.random()
        held = PLAIN if coin < 0.1 else None
        if 0.1 <= coin < 0.3 and self._may_hold:
            held = self._decided
        self.num_held += held is not None
        return held

    def decide(self, facts: StepFacts) -> Decision:
        shapes = [shape for one in facts.requests if one.network for shape in one.shapes]
        shape = shapes[self._rng.integers(len(shapes))] if shapes else None  # one in a step
        price = float(self._rng.random())
        found = [self._grant(one, shape, price) for one in facts.requests]
        grants = [grant for grant in found if grant is not None]
        rows = int(sum(grant.rows for grant in grants) * self._rng.uniform(0.5, 1.5))
        grants = [
            structs.replace(one, stop=structs.replace(one.stop, row_cap=rows))
            if one.stop is not None
            else one
            for one in grants
        ]
        offered = [one.request_id for one in facts.requests if one.offers]
        shadows = tuple(one for one in offered if self._rng.random() < 0.5)
        self._decided = Decision(Reason.GAIN, tuple(grants), price, shadows=shadows)
        networks = {one.request_id: one.network for one in facts.requests}
        self._may_hold = all(grant.source == networks[grant.request_id] for grant in grants)
        return self._decided

    def observe(self, outcome: StepOutcome) -> None:
        assert outcome.decision is self._decided
        self.num_observed += 1
        self.num_shadows += len(outcome.shadows)
        assert all(0 <= shadow.accepted <= shadow.drafted for shadow in outcome.shadows)
        grants = {grant.request_id: grant for grant in outcome.decision.grants}
        deepest = max((grant.levels for grant in grants.values()), default=0)
        for draft in outcome.drafts:
            grant = grants[draft.request_id]
            # A small tree may be as deep as the largest one of its step.
            most = deepest if grant.shape else grant.levels
            assert 0 <= draft.accepted <= draft.drafted <= most
            if grant.source in NETWORK_SOURCES:
                self.shapes.add(grant.shape)
            self.num_stopped += 0 < len(draft.margins) > draft.drafted
            self.lengths.add((str(grants[draft.request_id].source), draft.drafted))
        self.num_mixed += len({draft.drafted for draft in outcome.drafts}) > 1
        assert outcome.num_tokens >= len(outcome.facts.requests)
        assert min(outcome.draft_s, outcome.target_s, outcome.host_s) >= 0

    def forget(self, request_id: str) -> None:
        """It knows no request."""

    def _grant(self, one: RequestFacts, network_shape: Shape | None, price: float) -> Grant | None:
        ways = [(offer.source, offer.length, offer.shape) for offer in one.offers]
        if one.network is not None and network_shape is not None:
            ways.append((one.network, one.most_levels(network_shape), network_shape))
        if not ways or not one.max_drafts or self._rng.random() < 0.2:
            return None
        source, most, shape = ways[self._rng.integers(len(ways))]
        levels = int(self._rng.integers(0, most + 1))
        if levels == 0:
            return None
        rows = sum(shape[:levels]) if shape else levels
        stop = None
        is_chain = source == one.network and not shape
        if is_chain and one.can_stop and self._rng.random() < 0.5:
            weights, biases = self._rng.normal(0.5, 0.5, (2, levels)).tolist()
            stop = LiveStop(tuple(weights), tuple(biases), price)
        source = DraftSource(source)
        return Grant(one.request_id, source, levels, rows, 0, one.rule, shape, stop)
