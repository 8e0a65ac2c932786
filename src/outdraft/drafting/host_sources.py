"""Proposers on the host: their contract, and the drafts that they have before the decision.

Drafts that are not verified are compared with the text that comes: their acceptance if verified.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from outdraft.config.speculation import SpeculationConfig
from outdraft.control.facts import ShadowOutcome
from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk, DraftSource, depths_of
from outdraft.core.request import FinishReason, Request
from outdraft.drafting.prediction import PredictionProposer
from outdraft.drafting.request_limits import (
    has_prediction,
    may_use,
    most_draft_rows,
    wished_drafts,
)

Drafts = dict[DraftSource, Draft]  # of one request, the preferred source first


class HostProposer(Protocol):
    """Drafts from token ids alone, on the host.

    A proposer can be slow, never wrong: whatever it returns, the verified output is the one
    that plain decoding would give. It uses no model, no device and no other proposer.

    The token ids of a request only grow from ask to ask: they never shrink or change, not even
    after a preemption. After steps without an ask they have grown by more tokens. So an incremental
    index pays. A proposer still works with any tokens that it is given: it starts again when they
    do not continue the earlier ones.
    """

    source: DraftSource

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        """One draft per ask, in order, of at most `ask.max_tokens` tokens.

        Draft() means "no idea", and costs nothing. Token ids are read during the call only.
        """
        ...

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        """The request ended: drop its state.

        The proposer may learn from `token_ids`, int32 [num_tokens], for later requests. None: there
        is nothing to learn (aborted, or not to be shared). Unknown request ids are fine.
        """
        ...


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
        found: dict[str, Drafts] = {}
        predicted = [request for request in requests if has_prediction(request)]
        most = max(self._config.max_drafts, self._draft_rows // num_running)
        self._ask(self._prediction, predicted, min(most, MAX_DRAFTS), found)
        others = [request for request in requests if request.id not in found]
        for proposer in self._proposers:
            asked = [request for request in others if may_use(request, proposer.source)]
            self._ask(proposer, asked, self._config.max_drafts, found)
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

    def _ask(
        self,
        proposer: HostProposer,
        requests: Sequence[Request],
        most: int,
        found: dict[str, Drafts],
    ) -> None:
        """Add the drafts, of at most `most` rows each, that a proposer has for these requests."""
        if not requests:
            return
        asks = [
            DraftAsk(
                one.id,
                one.token_ids,
                min(wished_drafts(most, one), one.max_drafts),
                one.num_prompt,
                one.prediction_ids if len(one.prediction_ids) else None,
            )
            for one in requests
        ]
        for ask, draft in zip(asks, proposer.propose(asks), strict=True):
            if len(draft):
                found.setdefault(ask.request_id, {})[proposer.source] = draft


class Shadows:
    """Owns the drafts that wait until their text has left them, or has reached their end. They cost
    no rows."""

    def __init__(self) -> None:
        # With the length of the text that each draft continues.
        self._waiting: dict[str, list[tuple[DraftSource, Draft, int]]] = {}

    def cast(self, request: Request, source: DraftSource, draft: Draft) -> None:
        """Remember a draft for the text as it is now."""
        self._waiting.setdefault(request.id, []).append((source, draft, request.num_tokens))

    def observe(self, requests: Iterable[Request]) -> tuple[ShadowOutcome, ...]:
        """Outcomes of the drafts whose texts have come."""
        outcomes: list[ShadowOutcome] = []
        for request in requests:
            for source, draft, start in self._waiting.pop(request.id, ()):
                text, num_levels = request.token_ids[start:].tolist(), max(depths_of(draft.parents))
                accepted = _num_followed(draft, text)
                if accepted < len(text) or accepted == num_levels:
                    offered = source, draft.match_length
                    outcomes.append(ShadowOutcome(*offered, num_levels, accepted))
                else:
                    self._waiting.setdefault(request.id, []).append((source, draft, start))
        return tuple(outcomes)

    def forget(self, request_id: str) -> None:
        """The request ended: nothing more comes."""
        self._waiting.pop(request_id, None)


def _num_followed(draft: Draft, text: Sequence[int]) -> int:
    """Number of tokens of the text that follow a path of the draft."""
    pairs, row = list(zip(draft.parents, draft.token_ids, strict=True)), 0
    for number, token_id in enumerate(text):
        if (row, token_id) not in pairs:
            return number
        row = pairs.index((row, token_id)) + 1
    return len(text)
