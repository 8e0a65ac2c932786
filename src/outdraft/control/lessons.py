"""How often steps that draft are decided and learned from, where that takes long beside a step.

Deciding, and learning from what came of it, takes a tenth of a millisecond for one request. Beside
a step of a large model that is nothing; a small one needs little more for a whole step. So there a
decision to draft holds for several steps, of which only one is looked at closely. Which step
that is follows from how many went by, never from what was drawn in them.
"""

from dataclasses import replace

from outdraft.control.facts import StepOutcome

DISTURBED = 0.05  # of a step, if deciding takes longer, its passes find other things in the caches
MOST_DISTURBED = 2.0  # times what deciding takes
FIRST_STEPS = 12  # behind a decision, or a prompt, that find them so
SHARE = 0.01  # of the time that deciding and learning may take
LONGEST = 48  # steps from one lesson to the next
SHORTEST = 4  # steps between two at first; twice as many behind each lesson
RATE = 1 / 16  # of the latest lesson in the average


class Lessons:
    """Counts steps from one lesson to the next, for one size of the batch."""

    def __init__(self) -> None:
        self._num = 0  # since all went as expected
        self._seconds = 0.0  # that one takes, on average
        self._num_missed = 0  # decisions that held for too few steps, since the last lesson

    def observe(self, seconds: float) -> None:
        """A step was decided, and is learned from."""
        self._num += 1
        self._num_missed = 0
        self._seconds += (seconds - self._seconds) * max(RATE, 1 / self._num)

    def renew(self) -> None:
        """Something has changed: lessons come more often for a while."""
        self._num = 0

    def steps(self, step_s: float) -> int:
        """Steps of this length from one lesson to the next, itself included; 1: all are lessons."""
        return min(self._most_steps(step_s), SHORTEST << min(self._num, 30))

    def place(self) -> int:
        """Which step behind a decision that begins to hold should be the lesson: one that finds
        the caches as usual, or an earlier one where decisions do not hold so long; at last the
        decided step itself, 0."""
        self._num_missed += 1
        return FIRST_STEPS >> (self._num_missed - 1)

    def seconds_a_step(self, plain_s: float, decided_share: float) -> float:
        """What lessons add to a step that drafts, beyond `plain_s`, in the long run.

        decided_share: of the steps that are decided in any case.
        """
        return self._seconds * max(decided_share, 1 / self._most_steps(plain_s))

    def _most_steps(self, step_s: float) -> int:
        dear = int(self._seconds / (SHARE * step_s)) if step_s > 0 else 1
        return max(1, min(dear, LONGEST))


class Disturbance:
    """How many times as long a step takes because it was decided, as plain steps show it.

    A network that is off drafts in decided steps only. If their times were taken as they are, it
    would look too slow to be tried in earnest.
    """

    def __init__(self) -> None:
        self._factor = 1.0

    def observe(self, actual_s: float, undisturbed_s: float, deciding_s: float) -> None:
        """A plain step that was decided, and what such a step takes if it is not.

        deciding_s: to decide and to learn. A pass is slower by twice that at most: more than that
        is an error of `undisturbed_s`.
        """
        most = 1 + MOST_DISTURBED * deciding_s / undisturbed_s
        factor = max(1.0, min(most, actual_s / undisturbed_s))
        self._factor += (factor - self._factor) / 8

    def removed(self, outcome: StepOutcome) -> StepOutcome:
        """The step as it would have been."""
        return replace(
            outcome,
            draft_s=outcome.draft_s / self._factor,
            target_s=outcome.target_s / self._factor,
            host_s=outcome.host_s / self._factor,
        )
