"""Limits of each request, independent of decisions: facts for control."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from outdraft.config.speculation import SpeculationConfig
from outdraft.control.facts import HostOffer, RequestFacts
from outdraft.core.decision import CHAIN, Shape
from outdraft.core.draft import MAX_DRAFTS, Draft, DraftSource
from outdraft.core.request import Request
from outdraft.core.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """Limits of the network that drafts.

    Attributes:
        max_len: most tokens of a text, the drafts included.
        source: of its drafts.
        shapes: of its drafts, the configured one first; a whole step has one of them.
        max_drafts: most drafts in one step, and
        max_chain: of a chain.
        unread_tokens: tokens that it would have to read now beyond those of a usual step.
        most_drawn: drafts of a step that may be drawn from probabilities, as if all requests that
            it drafts for had as many; None: any number.
        ends_live: a chain that a live rule ends takes fewer passes and rows. False: the host has to
            plan all of them, and to end a chain would only lose accepted tokens.
    """

    max_len: int
    source: DraftSource = DraftSource.MODEL
    shapes: tuple[Shape, ...] = (CHAIN,)
    max_drafts: int = MAX_DRAFTS
    unread_tokens: Callable[[Request], int] = lambda request: 0
    max_chain: int = MAX_DRAFTS
    ends_live: bool = True
    most_drawn: int | None = None


class RequestLimits:
    """Limits of each request: by the configuration, the network, and what it asks for itself."""

    def __init__(self, config: SpeculationConfig, drafter: DrafterLimits | None) -> None:
        self._config = config
        self._drafter = drafter

    def most_drafts(self, request: Request) -> int:
        """Most drafts for this request in any step."""
        if not self._config.sources or not request.wants_drafts:
            return 0
        most = MAX_DRAFTS if has_prediction(request) else self._config.max_drafts
        return wished_drafts(most, request)

    def may_draft(self, request: Request) -> bool:
        """A source may draft for it now."""
        return request.may_draft and request.max_drafts > 0 and self._max_drafts(request) > 0

    def network_may_draft(self, request: Request) -> bool:
        """The network may draft for it now or later."""
        return self.may_draft(request) and self.network_can_read(request) and self._may_ask(request)

    def network_can_read(self, request: Request) -> bool:
        """Its text is not too long for the network, even if that may not draft for it."""
        assert self._drafter is not None
        return request.num_tokens < self._drafter.max_len

    def fits(self, request: Request, num_drafts: int) -> bool:
        """The network may draft num_drafts tokens for it now."""
        assert self._drafter is not None
        if request.num_tokens + num_drafts > self._drafter.max_len or request.max_drafts == 0:
            return False
        return self._may_ask(request) and num_drafts <= self._max_drafts(request)

    def draws(self, rule: str) -> bool:
        """The network draws the drafts that this rule verifies, with their probabilities."""
        network = self._config.network
        is_drawn = rule not in ("greedy", "drafter_invariant")
        return network is not None and network.samples and is_drawn

    def facts(self, request: Request, drafts: Mapping[DraftSource, Draft]) -> RequestFacts:
        """A request's facts for control. drafts: of the host."""
        drafter, most = self._drafter, 0
        if request.may_draft and request.max_drafts > 0:
            most = self._max_drafts(request)
        network, unread = None, 0
        if drafter is not None and self._may_ask(request):
            end = request.num_tokens + min(most, request.max_drafts)
            if end <= drafter.max_len:
                network, most = str(drafter.source), min(most, drafter.max_drafts)
            unread = drafter.unread_tokens(request)
        return RequestFacts(
            request.id,
            request.max_total - request.num_tokens,
            most,
            request.num_tokens,
            tuple(offer(source, draft) for source, draft in drafts.items()),
            network,
            verification_rule(self._config, request.params),
            drafter.shapes if drafter is not None else (CHAIN,),
            unread,
            can_stop=drafter is not None and drafter.ends_live and CHAIN in drafter.shapes,
            max_chain=drafter.max_chain if drafter is not None else 0,
        )

    def _max_drafts(self, request: Request) -> int:
        """Most drafts in a step, of any source but a prediction; 0: it never drafts."""
        return wished_drafts(self._config.max_drafts, request) if self.most_drafts(request) else 0

    def _may_ask(self, request: Request) -> bool:
        """The network is among the sources of the request."""
        return self._drafter is not None and may_use(request, self._drafter.source)


def offer(source: DraftSource, draft: Draft) -> HostOffer:
    """The facts about a draft of the host that the controller needs."""
    shape = CHAIN if draft.is_chain else draft.level_sizes()
    return HostOffer(source, len(shape) or len(draft), draft.match_length, shape)


def most_draft_rows(config: SpeculationConfig, max_num_seqs: int) -> int:
    """Most drafts of all requests in one step.

    Predictions are longer than other drafts. Together they have no more rows than all requests
    could draft without them, or than one request may have.
    """
    if not config.sources:
        return 0
    return max(MAX_DRAFTS, config.max_drafts * max_num_seqs)


def wished_drafts(number: int, request: Request) -> int:
    """The smaller one of `number` and the number of drafts that the request asks for."""
    wish = request.params.speculation.num_speculative_tokens
    return number if wish is None else min(number, wish)


def has_prediction(request: Request) -> bool:
    return len(request.prediction_ids) > 0 and may_use(request, DraftSource.PREDICTION)


def may_use(request: Request, source: DraftSource) -> bool:
    """The request leaves the choice to the engine, or names this source."""
    return request.params.speculation.method in (None, str(source))


def verification_rule(config: SpeculationConfig, params: SamplingParams) -> str:
    """The rule that verifies a request's drafts; acceptance is learned for each rule apart."""
    if params.is_greedy:
        return "greedy"
    if params.seed is not None:
        return "drafter_invariant"
    return config.rejection_sample_method
