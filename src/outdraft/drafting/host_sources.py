"""Drafts that the sources of the host have for each request, before the decision."""

from collections.abc import Sequence

from outdraft.config.speculation import SpeculationConfig
from outdraft.control.facts import HostOffer
from outdraft.core.decision import CHAIN
from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk, DraftSource
from outdraft.core.request import FinishReason, Request
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.host.prediction import PredictionProposer
from outdraft.drafting.host.proposer import HostProposer

Drafts = dict[DraftSource, Draft]  # of one request, the preferred source first


class HostSources:
    """Asks the proposers on the host. What a client predicted goes before all of them."""

    def __init__(
        self, config: SpeculationConfig, proposers: Sequence[HostProposer], max_num_seqs: int
    ) -> None:
        self._config = config
        self._prediction = PredictionProposer()
        self._proposers = list(proposers)
        self._draft_rows = most_draft_rows(config, max_num_seqs)

    def drafts(self, requests: Sequence[Request], num_running: int) -> dict[str, Drafts]:
        """Drafts of requests that may have some, by request id; those without are left out.

        num_running: number of requests that run, or may begin to run in this step.
        """
        found = self._predicted(requests, num_running)
        if not self._proposers:
            return found
        others = [request for request in requests if request.id not in found]
        for proposer in self._proposers:
            asked = [request for request in others if may_use(request, proposer.source)]
            if not asked:
                continue
            most = self._config.max_drafts
            asks = [
                DraftAsk(r.id, r.token_ids, min(wished_drafts(most, r), r.max_drafts))
                for r in asked
            ]
            for ask, draft in zip(asks, proposer.propose(asks), strict=True):
                if len(draft):
                    found.setdefault(ask.request_id, {})[proposer.source] = draft
        return found

    def may_find(self, requests: Sequence[Request]) -> bool:
        """A look for drafts may find some; this check is cheaper than the look."""
        return bool(self._proposers) or any(len(one.prediction_ids) for one in requests)

    def finish(self, request: Request) -> None:
        """A request ended: the proposers drop its state, and learn from its text if it is whole.

        Later drafts, which a trace shows to their client, may repeat what was learned. So nothing
        is learned from a text with a salt, which is private.
        """
        is_shared = request.finish_reason is not FinishReason.ABORT and not request.block_salt
        text = request.token_ids if is_shared else None
        for proposer in (self._prediction, *self._proposers):
            proposer.finish(request.id, text)

    def _predicted(self, requests: Sequence[Request], num_running: int) -> dict[str, Drafts]:
        """Drafts for requests whose clients sent a prediction that is still right."""
        predicted = [request for request in requests if has_prediction(request)]
        if not predicted:
            return {}
        most = max(self._config.max_drafts, self._draft_rows // num_running)
        asks = [
            DraftAsk(
                request.id,
                request.token_ids,
                min(wished_drafts(MAX_DRAFTS, request), request.max_drafts, most),
                request.num_prompt,
                request.prediction_ids,
            )
            for request in predicted
        ]
        drafts = self._prediction.propose(asks)
        return {
            ask.request_id: {DraftSource.PREDICTION: draft}
            for ask, draft in zip(asks, drafts, strict=True)
            if len(draft)
        }


def offer(source: DraftSource, draft: Draft) -> HostOffer:
    """The facts about a draft that the controller needs."""
    if draft.is_chain:
        return HostOffer(source, len(draft), draft.match_length, CHAIN)
    shape = draft.level_sizes()
    return HostOffer(source, len(shape), draft.match_length, shape)


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
