"""Limits of each request, independent of decisions: facts for control."""

from collections.abc import Callable
from dataclasses import dataclass

from outdraft.config.speculation import SpeculationConfig
from outdraft.control.facts import RequestFacts
from outdraft.core.decision import CHAIN, Shape
from outdraft.core.draft import MAX_DRAFTS
from outdraft.core.plan import MODEL_CHAIN, ModelDrafting
from outdraft.core.request import Request
from outdraft.drafting.host_sources import (
    Drafts,
    has_prediction,
    may_use,
    offer,
    verification_rule,
    wished_drafts,
)


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """Limits of the network that drafts.

    Attributes:
        max_len: most tokens of a text, the drafts included.
        drafting: of trees, if the configuration has one.
        chain: of chains, which it may draft instead in a whole step; None: it only drafts these, or
            no chains at all.
        max_drafts: most drafts in one step, and
        max_chain: of a chain.
        unread_tokens: tokens that it would have to read now beyond those of a usual step.
        most_drawn: drafts of a step that may be drawn from probabilities, as if all requests that
            it drafts for had as many; None: any number.
        ends_live: a chain that a live rule ends takes fewer passes and rows. False: the host has to
            plan all of them, and to end a chain would only lose accepted tokens.
    """

    max_len: int
    drafting: ModelDrafting = MODEL_CHAIN
    max_drafts: int = MAX_DRAFTS
    unread_tokens: Callable[[Request], int] = lambda request: 0
    chain: ModelDrafting | None = None
    max_chain: int = MAX_DRAFTS
    ends_live: bool = True
    most_drawn: int | None = None

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The configured one first."""
        own = self.drafting.levels
        return (own,) if self.chain is None else (own, CHAIN)


@dataclass(frozen=True, slots=True)
class _Known:
    """The facts about a request that never change.

    Attributes:
        max_drafts: most drafts in a step, of any source but a prediction; 0: it never drafts.
        network: the network may draft for it.
    """

    max_drafts: int
    network: bool
    rule: str


class KnownRequests:
    """Looks at each request once."""

    def __init__(self, config: SpeculationConfig, drafter: DrafterLimits | None) -> None:
        self._config = config
        self._drafter = drafter
        self._by_id: dict[str, _Known] = {}

    def forget(self, request_id: str) -> None:
        """The request ended."""
        self._by_id.pop(request_id, None)

    def most_drafts(self, request: Request) -> int:
        """Most drafts for this request in any step."""
        if not self._config.sources or not request.wants_drafts:
            return 0
        most = MAX_DRAFTS if has_prediction(request) else self._config.max_drafts
        return wished_drafts(most, request)

    def may_draft(self, request: Request) -> bool:
        """A source may draft for it now."""
        return request.may_draft and request.max_drafts > 0 and self._known(request).max_drafts > 0

    def network_may_draft(self, request: Request) -> bool:
        """The network may draft for it now or later."""
        if not self.may_draft(request) or not self.network_can_read(request):
            return False
        return self._known(request).network

    def network_can_read(self, request: Request) -> bool:
        """Its text is not too long for the network."""
        assert self._drafter is not None
        return request.num_tokens < self._drafter.max_len

    def fits(self, request: Request, num_drafts: int) -> bool:
        """The network may draft num_drafts tokens for it now."""
        assert self._drafter is not None
        if request.num_tokens + num_drafts > self._drafter.max_len:
            return False
        known = self._known(request)
        return known.network and num_drafts <= known.max_drafts and request.max_drafts > 0

    def draws(self, request_id: str) -> bool:
        """The network draws the request's drafts, and verification needs their probabilities."""
        known, network = self._by_id.get(request_id), self._config.network
        if known is None or network is None or not network.samples:
            return False
        return known.rule not in ("greedy", "drafter_invariant")

    def facts(self, request: Request, drafts: Drafts) -> RequestFacts:
        """A request's facts for control. drafts: of the host."""
        known, drafter = self._known(request), self._drafter
        most = known.max_drafts if request.may_draft and request.max_drafts > 0 else 0
        network, unread = None, 0
        if drafter is not None and known.network:
            end = request.num_tokens + min(most, request.max_drafts)
            if end <= drafter.max_len:
                network, most = str(drafter.drafting.source), min(most, drafter.max_drafts)
            unread = drafter.unread_tokens(request)
        return RequestFacts(
            request.id,
            request.max_total - request.num_tokens,
            most,
            request.num_tokens,
            tuple(offer(source, draft) for source, draft in drafts.items()),
            network,
            known.rule,
            drafter.shapes if drafter is not None else (CHAIN,),
            unread,
            can_stop=drafter is not None and drafter.ends_live and CHAIN in drafter.shapes,
            max_chain=drafter.max_chain if drafter is not None else 0,
        )

    def _known(self, request: Request) -> _Known:
        known = self._by_id.get(request.id)
        if known is None:
            drafter = self._drafter
            known = self._by_id[request.id] = _Known(
                wished_drafts(self._config.max_drafts, request) if self.most_drafts(request) else 0,
                drafter is not None and may_use(request, drafter.drafting.source),
                verification_rule(self._config, request.params),
            )
        return known
