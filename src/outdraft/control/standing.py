"""A decision that stands: the steps that follow need no facts while it does.

Plain decoding must cost what an engine without a drafter costs. So a decision for it is not made
again in every step, and the engine need not even gather what it would be made from. The same holds
for steps that draft, where they take so little time that deciding would be felt.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from outdraft.control.facts import Decision, Fate, Reason

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
        lesson_at: steps left behind the one that should be learned from; negative: none should.
        passed: steps that it stood for, if it drafts.
        is_proven: several others like it came before, so that it stands for other requests, too.
    """

    decision: Decision
    num_requests: int
    has_prompts: bool
    most: int = 0
    left: int = 0
    lesson_at: int = -1
    passed: Passed = field(default_factory=Passed)
    is_proven: bool = False

    def fits(self, num_requests: int) -> bool:
        spread = 0 if self.decision.grants else self.num_requests // SPREAD
        return self.left > 0 and abs(num_requests - self.num_requests) <= spread

    def pass_by(self, num_tokens: int, step_s: float, fates: Sequence[Fate]) -> None:
        """It stood for a step that drafted."""
        decision, passed = self.decision, self.passed
        # A step that took very long met something else: it counts as twice the prediction.
        step_s = min(step_s, 2 * decision.step_s)
        plain_tokens = self.num_requests * step_s / decision.plain_s
        excess = num_tokens - (1 + decision.gain) * plain_tokens
        passed.num_steps += 1
        passed.tokens += num_tokens
        passed.seconds += step_s
        passed.squares += excess * excess
        for request_id, drafted, accepted in fates:
            passed.fates.setdefault(request_id, []).append((drafted, accepted))

    def take_passed(self) -> Passed:
        """What passed since it was last asked."""
        passed, self.passed = self.passed, Passed()
        return passed


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

    def find(self, num_requests: int, prompt_rows: int) -> Standing | None:
        """What stands for such a step, which is counted; None: it has to be decided."""
        standing = self._known.get(prompt_rows.bit_length())
        if standing is None or not standing.fits(num_requests):
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
        self._known = {
            rows: one for rows, one in self._known.items() if bool(one.decision.grants) != drafts
        }

    def leave(self) -> None:
        """A request ended, and another may come: nothing stands when all may have changed."""
        for standing in self._known.values():
            shares = max(1, standing.num_requests) * (PROVEN if standing.is_proven else 1)
            gone = math.ceil(standing.most / shares)
            # Whoever comes should draft at once if drafts pay.
            standing.left = 0 if standing.decision.grants else standing.left - gone
