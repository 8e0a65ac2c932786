"""Who drafts for which request in this step, and how much.

Sources are asked in the order of the configuration. A draft from the host (suffix, n-gram) is
taken when what it promises is worth more than what the draft model has lately delivered; else
the model drafts, on the device. Promises are corrected by measured success, source by source.
"""

from collections.abc import Sequence

from outdraft.config.speculation import SpeculationConfig
from outdraft.core.draft import Draft, DraftAsk, DraftSource
from outdraft.core.errors import RequestError
from outdraft.core.plan import DraftChoice
from outdraft.core.request import FinishReason, Request
from outdraft.spec.proposer import HostProposer

FORGETTING = 0.95  # weight of the past in the running averages, per draft
MIN_EXPECTED_ACCEPTED = 0.25  # below this a draft from the host is not worth its rows


class SourceRecord:
    """Running averages of what one source promised and delivered, in tokens a draft."""

    def __init__(self, promised: float, accepted: float) -> None:
        self.promised = promised
        self.accepted = accepted

    def observe(self, promised: float, accepted: int) -> None:
        self.promised += (1 - FORGETTING) * (promised - self.promised)
        self.accepted += (1 - FORGETTING) * (accepted - self.accepted)

    @property
    def delivery(self) -> float:
        """Accepted tokens for every promised one."""
        return self.accepted / max(self.promised, 1e-6)


class DraftPolicy:
    """Turns requests into draft choices; learns from what was accepted."""

    def __init__(
        self,
        config: SpeculationConfig,
        proposers: Sequence[HostProposer],
        drafter_max_len: int | None,
    ) -> None:
        self.config = config
        self._proposers = list(proposers)
        self._drafter_max_len = drafter_max_len  # None: there is no draft model
        first = config.num_speculative_tokens / 2
        self._records = {source: SourceRecord(first, first) for source in DraftSource}

    def check(self, request: Request) -> None:
        """Raise RequestError if the request asks for a source that the engine does not have."""
        method = request.params.speculation.method
        allowed = ["off", *(str(source) for source in self.config.methods)]
        if method is not None and method not in allowed:
            raise RequestError(
                f"speculation method must be one of {', '.join(allowed)}, got {method!r}",
                "speculation",
            )

    def choose(self, requests: Sequence[Request], num_running: int) -> dict[str, DraftChoice]:
        """What each request verifies in the next step; requests without an entry do not draft."""
        limit = self.config.disable_by_batch_size
        if limit is not None and num_running > limit:
            return {}
        wanting = {r.id: r for r in requests if self.num_drafts(r) > 0}
        best: dict[str, tuple[float, DraftChoice]] = {}
        for proposer in self._proposers:
            asked = [r for r in wanting.values() if _may_use(r, proposer.source)]
            asks = [DraftAsk(r.id, r.token_ids, self.num_drafts(r)) for r in asked]
            drafts = proposer.propose(asks) if asks else []
            for ask, draft in zip(asks, drafts, strict=True):
                value = self._expected(proposer.source, draft)
                if value > best.get(ask.request_id, (MIN_EXPECTED_ACCEPTED,))[0]:
                    best[ask.request_id] = (value, DraftChoice(proposer.source, draft))
        choices: dict[str, DraftChoice] = {}
        for request in wanting.values():
            value, choice = best.get(request.id, (0.0, None))
            if self._drafter_fits(request) and value <= self._records[DraftSource.MODEL].accepted:
                choice = DraftChoice(DraftSource.MODEL, num_model_drafts=self.num_drafts(request))
            if choice is not None:
                choices[request.id] = choice
        return choices

    def observe(self, choice: DraftChoice, num_accepted: int) -> None:
        """Learn how a verified draft fared."""
        promised = choice.draft.score if len(choice.draft) else choice.num_model_drafts
        self._records[choice.source].observe(promised, num_accepted)

    def finish(self, request: Request) -> None:
        """A request ended: the proposers drop its state, and learn from its text if it is whole."""
        text = None if request.finish_reason is FinishReason.ABORT else request.token_ids
        for proposer in self._proposers:
            proposer.finish(request.id, text)

    def num_drafts(self, request: Request) -> int:
        """Most drafts for this request in one step."""
        wish = request.params.speculation
        if wish.method == "off":
            return 0
        number = self.config.num_speculative_tokens
        if wish.num_speculative_tokens is not None:
            number = min(number, wish.num_speculative_tokens)
        return min(number, request.max_drafts)

    def _expected(self, source: DraftSource, draft: Draft) -> float:
        return min(draft.score * self._records[source].delivery, len(draft))

    def _drafter_fits(self, request: Request) -> bool:
        if self._drafter_max_len is None or not _may_use(request, DraftSource.MODEL):
            return False
        return request.num_tokens + self.num_drafts(request) <= self._drafter_max_len


def _may_use(request: Request, source: DraftSource) -> bool:
    return request.params.speculation.method in (None, str(source))
