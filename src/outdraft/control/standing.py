"""A decision that stands: the steps that follow need no facts while it does.

Plain decoding must cost what an engine without a drafter costs. So a decision for it is not made
again in every step, and the engine need not even gather what it would be made from. The same holds
for steps that draft, where they take so little time that deciding would be felt.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from outdraft.control.facts import Decision, Fate, Grant, Reason, StepFacts
from outdraft.control.outlook import Outlook
from outdraft.control.plans import Prices

MAX_STEPS = 32  # that a plain decision stands for
PROVEN = 4  # times as many requests may end before it is decided anew if it was right for long
SPREAD = 8  # it stands for batches that differ by less than one request in so many


@dataclass(slots=True)
class Passed:
    """Steps in sum.

    Attributes:
        squares: of each step's tokens beyond those predicted for its time.
        fates: of drafts that were not observed, by request: levels verified, and accepted.
    """

    num_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    squares: float = 0.0
    fates: dict[str, list[tuple[int, int]]] = field(
        default_factory=dict[str, list[tuple[int, int]]]
    )


@dataclass(slots=True)
class Standing:
    """One decision.

    Attributes:
        most: steps that it was to stand for,
        left: and that it still stands for.
        drafts: whether anybody drafts.
        spread: it fits batches that differ by so many requests.
        lesson_at: steps left behind the one that should be learned from; negative: none should.
        passed: steps that it stood for, if it drafts: tokens, seconds, fates of drafts. To add
            them up one after the other takes less time than in each step.
        facts: that it was made from, if it drafts without offers,
        outlook, prices: and what it was made by, beside what was known of acceptance.
        newcomer: what a request may draft of which nothing is known, without its name.
        num_gone: requests that ended since; others may have their places.
        is_proven: several others like it came before, so that it stands for other requests, too.
    """

    decision: Decision
    num_requests: int
    has_prompts: bool
    most: int = 0
    left: int = 0
    lesson_at: int = -1
    passed: list[tuple[int, float, Iterable[Fate]]] = field(
        default_factory=list[tuple[int, float, Iterable[Fate]]]
    )
    facts: StepFacts | None = None
    outlook: Outlook | None = None
    prices: Prices | None = None
    newcomer: Grant | None = None
    num_gone: int = 0
    is_proven: bool = False
    drafts: bool = field(init=False)
    spread: int = field(init=False)

    def __post_init__(self) -> None:
        self.drafts = bool(self.decision.grants)
        self.spread = 0 if self.drafts else self.num_requests // SPREAD

    def replace_ended(self, request_ids: Sequence[str]) -> None:
        """Give the places of requests that ended to others that came, which draft as newcomers.

        request_ids: who samples in this step.
        """
        assert self.facts is not None
        known = [request.request_id for request in self.facts.requests]
        ended = [one for one in known if one not in request_ids]
        heirs = dict(zip(ended, [one for one in request_ids if one not in known], strict=False))
        if not heirs:
            return
        requests = [
            replace(request, request_id=heirs.get(request.request_id, request.request_id))
            for request in self.facts.requests
        ]
        self.facts = replace(self.facts, requests=tuple(requests))
        grants = [grant for grant in self.decision.grants if grant.request_id not in heirs]
        if self.newcomer is not None:
            grants += [replace(self.newcomer, request_id=new) for new in heirs.values()]
        self.decision = replace(self.decision, grants=tuple(grants))

    def take_passed(self) -> Passed:
        """What passed since it was last asked."""
        steps, self.passed = self.passed, []
        decision, whole = self.decision, Passed(len(steps))
        for num_tokens, took_s, fates in steps:
            step_s = decision.counted_s(took_s, is_held=True)
            plain_tokens = self.num_requests * step_s / decision.plain_s
            excess = num_tokens - (1 + decision.gain) * plain_tokens
            whole.tokens += num_tokens
            whole.seconds += step_s
            whole.squares += excess * excess
            for request_id, drafted, accepted in fates:
                whole.fates.setdefault(request_id, []).append((drafted, accepted))
        return whole


@dataclass(slots=True)
class StandingDecisions:
    """At most one decision for about as many prompt rows."""

    _known: dict[int, Standing] = field(default_factory=dict[int, Standing])

    @property
    def is_experiment(self) -> bool:
        """Whether plain decoding is being tried while drafts pay."""
        return any(
            one.left > 0 and one.decision.reason is Reason.PLAIN_PROBE
            for one in self._known.values()
        )

    def take(self, num_requests: int, prompt_rows: int) -> Standing | None:
        """What stands for such a step, which is counted; None: it has to be decided.

        One that was made without a prompt also stands while prompts are read in the place of
        requests that ended.
        """
        standing, missing = self._known.get(prompt_rows.bit_length()), 0
        if standing is None or standing.left <= 0:
            standing = self._known.get(0)
            if standing is None or not standing.num_gone or standing.left <= 0:
                return None
            missing = standing.num_gone
        fewest = standing.num_requests - standing.spread - missing
        if not fewest <= num_requests <= standing.num_requests + standing.spread:
            return None
        standing.left -= 1
        return standing

    def put(
        self,
        decision: Decision,
        num_requests: int,
        prompt_rows: int,
        left: int,
        lesson_at: int = -1,
    ) -> Standing:
        """`left`: steps that it may stand for. The others: as in Standing."""
        standing = Standing(decision, num_requests, prompt_rows > 0, left, left, lesson_at)
        self._known[prompt_rows.bit_length()] = standing
        return standing

    def clear(self, *, drafts: bool) -> None:
        """Forget the decisions that draft, or those that do not."""
        self._known = {rows: one for rows, one in self._known.items() if one.drafts != drafts}

    def leave(self, *, ends_plain: bool) -> None:
        """A request ended, and another may come: nothing stands when all may have changed.

        ends_plain: drafts would pay for the other one, so no decision against them stands.
        """
        if ends_plain:
            self.clear(drafts=False)
        for standing in self._known.values():
            standing.num_gone += 1
            if standing.drafts:
                # Whoever comes in its place drafts as a newcomer. Prompts end soon in any case.
                if standing.has_prompts or standing.num_gone >= standing.num_requests:
                    standing.left = 0
                continue
            shares = max(1, standing.num_requests) * (PROVEN if standing.is_proven else 1)
            gone = math.ceil(standing.most / shares)
            standing.left -= gone
