"""What was learned about acceptance, by source; makes options of what requests are offered."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from outdraft.control.acceptance import MAX_INFORMATION, NetworkCurve
from outdraft.control.drift import Costs
from outdraft.control.facts import Decision, Grant, RequestFacts, ShadowOutcome, Shape, StepOutcome
from outdraft.control.host_acceptance import HostCurve
from outdraft.control.plans import Option, Plan
from outdraft.core.draft import DraftSource

CurveKey = tuple[str, str, Shape]  # network, rule, shape
LEAST_WORTH = 0.1  # tokens that a level of a newcomer's draft should bring
LEARNED = 8  # drafts of a step
MIN_STEPS, HORIZON = 1.0, 128  # steps, tokens, over which catching up is paid at least


class Estimates:
    """Owns the acceptance curves.

    max_levels: most levels of any draft.
    """

    def __init__(self, max_levels: int) -> None:
        self._max_levels = max_levels
        self.networks: dict[CurveKey, NetworkCurve] = {}
        self.hosts: dict[str, HostCurve] = {}

    def network(self, source: str, rule: str, shape: Shape) -> NetworkCurve:
        key = source, rule, shape
        if key not in self.networks:
            self.networks[key] = NetworkCurve(len(shape) or self._max_levels)
        return self.networks[key]

    def host(self, source: str) -> HostCurve:
        if source not in self.hosts:
            self.hosts[source] = HostCurve(is_given=source == DraftSource.PREDICTION)
        return self.hosts[source]

    def options(
        self, requests: Sequence[RequestFacts], costs: Costs, *, optimism: float = 0.0
    ) -> list[list[Option]]:
        """By request: all ways in which it could draft now."""
        survivals = _Survivals(self, requests, optimism=optimism)
        return [self._options(request, costs, survivals) for request in requests]

    def _options(
        self, request: RequestFacts, costs: Costs, survivals: "_Survivals"
    ) -> list[Option]:
        if request.max_drafts == 0:
            return []
        options = [
            Option(
                offer.source,
                self.host(offer.source).survivals(offer.match_length, offer.length),
                offer.shape,
                match_length=offer.match_length,
            )
            for offer in request.offers
        ]
        if request.network is not None:
            options += [
                self._of_network(request, shape, survivals.find(request, shape), costs)
                for shape in request.shapes
            ]
        return [option for option in options if option.survivals]

    def observe(self, outcome: StepOutcome, turn: int) -> float:
        """Learn from a step; how much better networks fared than predicted, in tokens.

        Some drafts of a large batch teach enough: which ones goes by the turn, never by outcomes.
        """
        grants = {grant.request_id: grant for grant in outcome.decision.grants}
        networks = {r.request_id: r.network for r in outcome.facts.requests}
        excess = 0.0
        count = len(outcome.drafts)
        first = turn * LEARNED % count if count > LEARNED else 0
        for draft in (outcome.drafts + outcome.drafts)[first : first + min(count, LEARNED)]:
            grant = grants[draft.request_id]
            if grant.source == networks[draft.request_id]:
                curve = self.network(grant.source, grant.rule, grant.shape)
                curve.memory = MAX_INFORMATION * max(1.0, min(count, LEARNED) / 2)
                before = curve.logits if len(self.networks) > 1 else []
                if draft.taught:
                    curve.teach(draft.request_id, draft.taught, draft.taught_accepted)
                excess += curve.observe(draft)
                if before:
                    self._tell_others(grant, before)
            else:
                self.host(grant.source).observe(grant.match_length, draft.drafted, draft.accepted)
        self.observe_shadows(outcome.shadows)
        return excess

    def observe_held(
        self, grants: Sequence[Grant], fates: Mapping[str, Sequence[tuple[int, int]]]
    ) -> None:
        """Learn how drafts fared, by request: levels verified, and accepted.

        A chain that the live rule may have ended says too much for its levels without its margins.
        """
        for grant in grants:
            own = fates.get(grant.request_id, ())
            if grant.source in self.hosts:
                for drafted, accepted in own:
                    self.hosts[grant.source].observe(grant.match_length, drafted, accepted)
                continue
            curve = self.networks.get((grant.source, grant.rule, grant.shape))
            if curve is None or not own or grant.stop is not None:
                continue
            before = curve.logits if len(self.networks) > 1 else []
            curve.observe_fates(grant.request_id, own)
            if before:
                self._tell_others(grant, before)

    def _tell_others(self, grant: Grant, before: list[float]) -> None:
        """Curves of other shapes learn from a draft of this one; `before`: its logits by level."""
        after = self.network(grant.source, grant.rule, grant.shape).logits
        moved = [new - old for new, old in zip(after, before, strict=True)]
        for (source, rule, shape), curve in self.networks.items():
            if (source, rule) == (grant.source, grant.rule) and shape != grant.shape:
                curve.follow(moved)

    def observe_shadows(self, shadows: Sequence[ShadowOutcome]) -> None:
        for shadow in shadows:
            self.host(shadow.source).observe(shadow.match_length, shadow.drafted, shadow.accepted)

    def doubt_network(self, request: RequestFacts, information: float) -> None:
        for shape in request.shapes:
            self.network(request.network or "", request.rule, shape).doubt(information)

    def is_known(self, request: RequestFacts) -> bool:
        """Whether drafts for the request have shown how easy it is, beside others."""
        return any(
            key in self.networks and self.networks[key].knows(request.request_id)
            for key in [(request.network or "", request.rule, shape) for shape in request.shapes]
        )

    def has_drafted(self, request: RequestFacts) -> bool:
        """Whether the request's network has shown anything of itself."""
        return any(
            self.network(request.network or "", request.rule, shape).num_labels > 0
            for shape in request.shapes
        )

    def grant(
        self, request: RequestFacts, option: Option, levels: int, plan: Plan, *, has_room: bool
    ) -> Grant:
        """What so many levels of an option mean for the engine.

        has_room: whether a chain that goes well may become longer than planned.
        """
        expected = float(sum(option.survivals[:levels]))
        stop = None
        if plan.price > 0 and option.is_network and not option.shape and request.can_stop:
            most = min(plan.depth, len(option.survivals))
            stop = self.network(option.source, request.rule, ()).stop_rule(request.request_id, most)
            levels = most if stop is not None and has_room else levels
        return Grant(
            request.request_id,
            option.source,
            levels,
            option.num_rows(levels),
            expected,
            option.match_length,
            request.rule,
            option.shape,
            stop,
        )

    def newcomer(self, decision: Decision) -> Grant | None:
        """What a request that nothing is known of may draft beside those of a decision: as far as
        they do, where its rows are worth their price. Without a name.
        """
        deepest = max(decision.grants, key=lambda grant: grant.levels)
        if deepest.shape:
            return replace(deepest, request_id="")
        curve, least = (
            self.network(deepest.source, deepest.rule, ()),
            max(decision.price, LEAST_WORTH),
        )
        survivals = [s for s in curve.survivals("", deepest.levels) if s >= least]
        if not survivals:
            return None
        levels = len(survivals)
        stop = curve.stop_rule("", levels) if deepest.stop is not None else None
        return replace(
            deepest,
            request_id="",
            levels=levels,
            rows=levels,
            expected_tokens=float(sum(survivals)),
            stop=stop,
        )

    def forget(self, request_id: str) -> None:
        for curve in self.networks.values():
            curve.forget(request_id)

    def _of_network(
        self, request: RequestFacts, shape: Shape, survivals: list[float], costs: Costs
    ) -> Option:
        source = request.network or ""
        fixed_s = 0.0
        if request.lag_tokens and survivals:
            # The steps to come pay for it. Who came so far is expected to come on so far.
            tokens = min(request.max_tokens, max(HORIZON, 2 * request.lag_tokens))
            steps = max(MIN_STEPS, tokens / (1 + sum(survivals)))
            fixed_s = costs.catch_up_s(source, request.lag_tokens) / steps
        return Option(source, survivals, shape, is_network=True, fixed_s=fixed_s)


class _Survivals:
    """Those of a step's requests, computed at once by network, rule and shape."""

    def __init__(
        self, estimates: Estimates, requests: Sequence[RequestFacts], *, optimism: float
    ) -> None:
        ids: dict[CurveKey, list[str]] = {}
        for request in requests:
            if request.network is not None and request.max_drafts:
                for shape in request.shapes:
                    key = request.network, request.rule, shape
                    ids.setdefault(key, []).append(request.request_id)
        self._known: dict[CurveKey, dict[str, list[float]]] = {}
        most: dict[tuple[str, str], float] = {}
        for network, rule, shape in ids:
            known = estimates.network(network, rule, shape).information
            most[network, rule] = max(known, most.get((network, rule), 0.0))
        for key, own in ids.items():
            rows = estimates.network(*key).all_survivals(
                own, optimism=optimism, most_known=most[key[:2]]
            )
            self._known[key] = dict(zip(own, rows, strict=True))

    def find(self, request: RequestFacts, shape: Shape) -> list[float]:
        """As many levels as the request has rows and tokens left for."""
        row = self._known[request.network or "", request.rule, shape][request.request_id]
        return row[: request.most_levels(shape)]
