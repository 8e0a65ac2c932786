"""When plain decoding is timed, and when it is tried while drafts pay.

A lone plain step among others that draft takes longer than plain decoding does: caches and branches
have to be learned again. So plain steps are tried in bursts, of which the last ones are timed.
"""

import math

from outdraft.control.outlook import Regime
from outdraft.control.probes import plain_interval

FIRST_PLAIN = 16  # steps until plain decoding is timed for the first time while drafts pay,
RARER = 3  # and how many times as many until the next, where steps are short: an engine that just
# began is slow for a second or so;
LARGE = 0.1  # gain for which twice as many go by: a wrong time of plain steps would hardly hide it
WARM_PLAIN = 2, 12  # plain steps in a row from which on all are alike, at least and at most,
WARM_S = 0.01  # and the time behind which they are
TIMED_PLAIN = 4  # plain steps that are timed in a burst of them


class PlainSteps:
    """Counts plain steps, and steps since the last that told what plain decoding takes.

    Where steps are short, those that stand alone, as where sources of the host find nothing, tell
    too little.
    """

    def __init__(self) -> None:
        self._in_a_row = 0
        self._since = 0
        self._warm = WARM_PLAIN[0]  # of a row, until they are as all that follow

    @property
    def burst(self) -> int:
        """Plain steps in a row that tell what plain decoding takes."""
        return self._warm + TIMED_PLAIN

    @property
    def _are_short(self) -> bool:
        """Whether several steps go by until all are alike."""
        return self._warm > WARM_PLAIN[0]

    def warm_up(self, alone_s: float) -> None:
        """Plain steps take so long now."""
        least, most = WARM_PLAIN
        self._warm = max(least, min(most, math.ceil(WARM_S / alone_s)))

    def begin_burst(self) -> None:
        """Plain decoding is tried: if that is cut short, the next try comes no sooner."""
        self._since = 0

    def draft(self) -> None:
        """A step begins that drafts."""
        self._since += 1
        self._in_a_row = 0

    def pass_by(self) -> None:
        """A plain step begins."""
        self._in_a_row += 1
        tells = self._in_a_row >= self.burst or not self._are_short
        self._since = 0 if tells else self._since + 1

    def wants_time(self, routine: int) -> bool:
        """Whether the step that is plain now should be timed.

        Those of a warm burst are, and of steps that go on behind it one of so many.
        """
        number = self._in_a_row
        return number >= self._warm and (number <= self.burst or number % routine == 0)

    def num_untimed(self, routine: int) -> int:
        """Plain steps from the next one on, in a row, none of which should be timed."""
        following = self._in_a_row + 1
        if following < self._warm:
            return self._warm - following
        return 0 if following <= self.burst else -following % routine

    def is_due(self, gain: float, regime: Regime) -> bool:
        """Whether plain decoding should be tried although drafts gain so much."""
        interval = plain_interval(gain, self.burst)
        if regime.num_plain_bursts == 0 or self._are_short:
            early = FIRST_PLAIN * RARER ** min(regime.num_plain_bursts, 8)
            interval = min(interval, round(early * (1 + max(0.0, gain) / LARGE)))
        return self._since >= interval
