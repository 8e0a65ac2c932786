"""Falls back to plain decoding when drafts lose time in fact, whatever was predicted.

A one-sided CUSUM of what steps gained over plain decoding, in tokens. After an alarm drafts wait
for a number of steps, then they are tried again; the wait doubles with each alarm and begins anew
when a trial wins.
"""

import math

SLACK = 0.01  # of plain decoding's tokens: a smaller loss is none
WINDOW = 50  # steps that a trial takes
DEVIATIONS = 2.5  # of a window's gain that are taken for chance
FIRST_WAIT, LONGEST_WAIT = 64, 4096  # steps
FORGETTING = 0.99  # of the variance, per step


class Guard:
    """Watches speculation at one size of the batch."""

    def __init__(self) -> None:
        self.waiting = 0  # steps that drafts still wait
        self.num_alarms = 0
        self.gain_at_alarm = 0.0  # as predicted then
        self._wait = FIRST_WAIT
        self._loss = 0.0
        self._trial = 0  # steps of the trial, and
        self._trial_gain = 0.0  # what they brought
        self._variance = 1.0  # of a step's gain, in tokens squared

    def watch(
        self,
        gain: float,
        plain_tokens: float,
        predicted_gain: float,
        num_steps: int = 1,
        squares: float | None = None,
    ) -> bool:
        """Add steps that drafted; true if that is an alarm.

        gain: tokens more than plain decoding would have brought in the steps' time.
        plain_tokens: what it would have brought.
        predicted_gain: as Decision.gain.
        squares: of each step's tokens beyond those predicted, in sum; None: it is one step.
        """
        if squares is None:
            squares = (gain - predicted_gain * plain_tokens) ** 2
        keep = FORGETTING**num_steps
        self._variance = keep * self._variance + (1 - keep) * squares / num_steps
        self._loss = max(0.0, self._loss - gain - SLACK * plain_tokens)
        self._trial += num_steps
        self._trial_gain += gain
        if self._trial >= WINDOW:
            if self._trial_gain > 0:
                self._wait = FIRST_WAIT
            self._trial, self._trial_gain = 0, 0.0
        if self._loss <= DEVIATIONS * math.sqrt(WINDOW * self._variance):
            return False
        self.num_alarms += 1
        self.waiting, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
        self.gain_at_alarm = predicted_gain
        self._restart()
        return True

    def pass_by(self, num_steps: int = 1) -> None:
        """Plain steps went by."""
        self.waiting = max(0, self.waiting - num_steps)

    def release(self) -> None:
        """There is good evidence that drafts pay again."""
        self.waiting = 0
        self._restart()

    def _restart(self) -> None:
        self._loss, self._trial, self._trial_gain = 0.0, 0, 0.0
