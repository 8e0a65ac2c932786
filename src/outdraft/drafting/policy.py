"""Which source drafts for each request in this step, and how much.

A prediction of the client goes first: verifying it costs rows only. Next come the proposers on the
host (suffix, n-gram), whose drafts cost next to nothing. The best of their drafts is taken if it
promises more tokens per time than the network has lately brought; else the network drafts, on the
device. Where a good draft of the host ends too early, a network that can do so continues it.
Promises are corrected by measured success, for each source apart. A source that has been refused
many times is tried once in a while, since it can prove itself in no other way.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from outdraft.config.speculation import SpeculationConfig
from outdraft.core.draft import MAX_DRAFTS, DraftAsk, DraftSource
from outdraft.core.errors import RequestError
from outdraft.core.plan import MODEL_CHAIN, DraftChoice, ModelDrafting
from outdraft.core.request import FinishReason, Request
from outdraft.drafting.host.prediction import PredictionProposer
from outdraft.drafting.host.proposer import HostProposer

FORGETTING = 0.95  # weight of the past in the running averages, per draft
MIN_EXPECTED_PER_ROW = 0.1  # accepted tokens; a draft that promises fewer is not taken
REFUSALS_PER_TRIAL = 32


class SourceRecord:
    """Running averages of what one source promised and brought, in tokens per draft."""

    def __init__(self, promised: float, accepted: float) -> None:
        self.promised = promised
        self.accepted = accepted
        self.num_refused = 0  # since the last trial

    def observe(self, promised: float, accepted: int) -> None:
        self.promised += (1 - FORGETTING) * (promised - self.promised)
        self.accepted += (1 - FORGETTING) * (accepted - self.accepted)

    @property
    def delivery(self) -> float:
        """Accepted tokens for every promised one."""
        return self.accepted / max(self.promised, 1e-6)

    def is_trial(self) -> bool:
        """Count a refusal; true when it is time to take the refused draft all the same."""
        self.num_refused = (self.num_refused + 1) % REFUSALS_PER_TRIAL
        return self.num_refused == 0


@dataclass(frozen=True, slots=True)
class DrafterLimits:
    """What the policy needs to know about the drafter.

    Attributes:
        max_len: most tokens of a text, the drafts included.
        cost: time of one pass as a share of a step of the target, estimated from the bytes that
            both read.
        max_passes: most passes for a draft, however long it is; a chain takes one for each token.
        max_drafts: most drafts in one step.
    """

    max_len: int
    cost: float
    drafting: ModelDrafting = MODEL_CHAIN
    max_passes: int = MAX_DRAFTS
    max_drafts: int = MAX_DRAFTS

    def time_of(self, num_drafts: int) -> float:
        """How long drafting takes, in steps of the target."""
        return min(num_drafts, self.max_passes) * self.cost


class DraftPolicy:
    """Turns requests into draft choices; learns from what was accepted."""

    def __init__(
        self,
        config: SpeculationConfig,
        proposers: Sequence[HostProposer],
        drafter: DrafterLimits | None,
        max_num_seqs: int,
    ) -> None:
        self.config = config
        self._prediction = PredictionProposer()
        self._proposers = list(proposers)
        self._drafter = drafter
        self._draft_rows = most_draft_rows(config, max_num_seqs)
        first = config.num_speculative_tokens / 2
        self._records = {source: SourceRecord(first, first) for source in DraftSource}

    @property
    def sources(self) -> tuple[DraftSource, ...]:
        """Who may draft, the preferred one first; empty without speculation."""
        if not self.config.sources:
            return ()
        return DraftSource.PREDICTION, *self.config.methods

    def check(self, request: Request) -> None:
        """Raise RequestError if the request asks for a source that the engine does not have."""
        method = request.params.speculation.method
        allowed = [str(source) for source in self.sources]
        if method is not None and method not in allowed:
            raise RequestError(
                f"method of speculation must be one of {', '.join(allowed)}, got {method!r}"
                if allowed
                else "the engine was started without speculation, so that it has no method",
                "speculation",
            )

    def choose(self, requests: Sequence[Request], num_running: int) -> dict[str, DraftChoice]:
        """What each request verifies in the next step; requests without an entry do not draft.

        num_running: how many requests run, or may begin to run in this step.
        """
        limit = self.config.disable_by_batch_size
        if limit is not None and num_running > limit:
            return {}
        wanting = [r for r in requests if self._may_draft(r)]
        chosen = self._predicted(wanting, num_running)
        others = [request for request in wanting if request.id not in chosen]
        best = self._best_of_host(others)
        for request in others:
            choice = self._pick(request, best.get(request.id))
            if choice is not None:
                chosen[request.id] = choice
        return chosen

    def observe(self, choice: DraftChoice, num_accepted: int) -> None:
        """Learn how a verified draft fared."""
        of_host = min(num_accepted, len(choice.draft))
        if len(choice.draft):
            self._records[choice.source].observe(choice.draft.score, of_host)
        # Behind a refused draft of the host, nothing shows how the network's were.
        if choice.num_model_drafts and of_host == len(choice.draft):
            record = self._records[choice.model.source]
            record.observe(choice.num_model_drafts, num_accepted - of_host)

    def finish(self, request: Request) -> None:
        """A request ended: the proposers drop its state, and learn from its text if it is whole."""
        text = None if request.finish_reason is FinishReason.ABORT else request.token_ids
        for proposer in (self._prediction, *self._proposers):
            proposer.finish(request.id, text)

    def num_drafts(self, request: Request, drafting: ModelDrafting = MODEL_CHAIN) -> int:
        """Most drafts of any source but a prediction for this request in the next step.

        `drafting`: who drafts them; a tree needs more rows than its longest path has tokens.
        """
        number = self.config.num_speculative_tokens
        wish = request.params.speculation.num_speculative_tokens
        most = drafting.most_drafts(request.max_drafts)
        return min(number if wish is None else min(number, wish), most)

    def most_drafts(self, request: Request) -> int:
        """Most drafts for this request in any step."""
        wish = request.params.speculation
        if not self.config.sources or not wish.enabled:
            return 0
        number = self.config.num_speculative_tokens
        if _has_prediction(request):
            number = MAX_DRAFTS
        if wish.num_speculative_tokens is not None:
            number = min(number, wish.num_speculative_tokens)
        return number

    def _may_draft(self, request: Request) -> bool:
        return min(self.most_drafts(request), request.max_drafts) > 0

    def _predicted(self, requests: Sequence[Request], num_running: int) -> dict[str, DraftChoice]:
        """Drafts for requests whose clients sent a prediction that is still right."""
        asks = [
            DraftAsk(
                request.id,
                request.token_ids,
                min(
                    self.most_drafts(request),
                    request.max_drafts,
                    max(self.config.num_speculative_tokens, self._draft_rows // num_running),
                ),
                request.num_prompt,
                request.prediction_ids,
            )
            for request in requests
            if _has_prediction(request)
        ]
        drafts = self._prediction.propose(asks) if asks else []
        return {
            ask.request_id: DraftChoice(DraftSource.PREDICTION, draft)
            for ask, draft in zip(asks, drafts, strict=True)
            if len(draft)
        }

    def _best_of_host(self, requests: Sequence[Request]) -> dict[str, tuple[float, DraftChoice]]:
        """Each request's best draft of the host, and the tokens that it is expected to bring."""
        best: dict[str, tuple[float, DraftChoice]] = {}
        for proposer in self._proposers:
            record = self._records[proposer.source]
            asked = [request for request in requests if _may_use(request, proposer.source)]
            asks = [DraftAsk(r.id, r.token_ids, self.num_drafts(r)) for r in asked]
            drafts = proposer.propose(asks) if asks else []
            for ask, draft in zip(asks, drafts, strict=True):
                if len(draft) == 0:
                    continue
                value = min(draft.score * record.delivery, len(draft))
                if ask.request_id not in best or value > best[ask.request_id][0]:
                    best[ask.request_id] = value, DraftChoice(proposer.source, draft)
        return best

    def _pick(self, request: Request, host: tuple[float, DraftChoice] | None) -> DraftChoice | None:
        """The host's draft if it promises more than the network's, or if it is due for a trial."""
        drafter = self._fitting_drafter(request)
        number = self.num_drafts(request, drafter.drafting if drafter else MODEL_CHAIN)
        if host is not None:
            value, choice = host
            least = MIN_EXPECTED_PER_ROW * len(choice)
            if drafter is not None:
                least = max(least, self._model_value(drafter, number) - 1)
            if value > least or self._records[choice.source].is_trial():
                return self._extended(choice, value, number, drafter)
        if drafter is None:
            return None
        return DraftChoice(
            drafter.drafting.source,
            num_model_drafts=min(number, drafter.max_drafts),
            model=drafter.drafting,
        )

    def _extended(
        self, choice: DraftChoice, value: float, number: int, drafter: DrafterLimits | None
    ) -> DraftChoice:
        """The host's choice, continued by a language model where that brings more per time."""
        if drafter is None or not drafter.drafting.can_go_on or not choice.draft.is_chain:
            return choice
        room = min(number, drafter.max_drafts) - len(choice)
        if room <= 0:
            return choice
        # If a draft's chance falls about linearly with its place, so many reach the end.
        whole = max(0.0, 2 * value / len(choice) - 1)
        gain = whole * min(self._records[drafter.drafting.source].accepted, room)
        if gain <= drafter.time_of(room) * (1 + value):
            return choice
        return DraftChoice(choice.source, choice.draft, room, drafter.drafting)

    def _model_value(self, drafter: DrafterLimits, num_drafts: int) -> float:
        """Tokens that a step with the network brings, per time of a step of the target."""
        num_drafts = min(num_drafts, drafter.max_drafts)
        accepted = min(self._records[drafter.drafting.source].accepted, num_drafts)
        return (1 + accepted) / (1 + drafter.time_of(num_drafts))

    def _fitting_drafter(self, request: Request) -> DrafterLimits | None:
        """The drafter, if it may draft for the request."""
        drafter = self._drafter
        if drafter is None or not _may_use(request, drafter.drafting.source):
            return None
        fits = request.num_tokens + self.num_drafts(request) <= drafter.max_len
        return drafter if fits else None


def most_draft_rows(config: SpeculationConfig, max_num_seqs: int) -> int:
    """Most drafts of all requests in one step.

    Predictions are longer than other drafts. Together they have no more rows than all requests
    could draft without them, or than one request may have.
    """
    if not config.sources:
        return 0
    return max(MAX_DRAFTS, config.num_speculative_tokens * max_num_seqs)


def _has_prediction(request: Request) -> bool:
    return len(request.prediction_ids) > 0 and _may_use(request, DraftSource.PREDICTION)


def _may_use(request: Request, source: DraftSource) -> bool:
    return request.params.speculation.method in (None, str(source))
