"""How often the sources of the host look for drafts.

A look takes time, and so does deciding on what it finds. Where all offers are refused, or where
drafts win less than looking for them takes, looks become rare, until they find what pays for them.
"""

SLEEPY = 64  # steps in a row whose offers were all refused
SHARE = 0.01  # most of the time that looks may take which win nothing
LONGEST = 8  # steps between two looks, and
LONGEST_DEAR = 32  # where to decide takes long beside a step
AWAKE = 8  # steps that a draft keeps looks going for
LONG_RUN, LATELY = 256, 8  # looks that are judged together: where they are common, and rare
# Tokens that a look wins for each request: less than the first makes looks rare, more than the
# second makes them common again. The first is no loss: plain steps that are tried between looks
# take longer than those of an engine that hardly looks.
LEAST, PROMISE = 0.02, 0.05
RICH = 1.25  # times as fast as plain decoding: where looks are rare, the next step looks as well


class Looks:
    """Counts steps whose offers were all refused, and what looks win over plain decoding."""

    def __init__(self) -> None:
        self._refused = 0  # in a row, or nearly
        self._apart = 1  # steps between two looks
        self._num_judged = 0  # looks since they became common, or rare
        self._worth = 0.0  # tokens that a look wins for each request, on average
        self._wins = True
        self._is_rich = False  # what the latest look found
        self._gain_without = 0.0  # of steps with a look that nothing was taken of, on average

    @property
    def are_rare(self) -> bool:
        return not self._wins or self._refused >= SLEEPY

    def are_due(self, step: int) -> bool:
        """Whether to look; `step`: a number of steps that grows."""
        return self.due_in(step) == 0

    def due_in(self, step: int) -> int:
        """Steps until the next look."""
        return -step % self._apart if self.are_rare and not self._is_rich else 0

    def cost(self, looking_share: float, deciding_share: float) -> None:
        """Shares of a plain step that to look, and to decide, takes."""
        self._apart = max(
            1,
            min(LONGEST, int(looking_share / SHARE)),
            min(LONGEST_DEAR, int(deciding_share / SHARE)),
        )

    def pass_over(self) -> None:
        """A look that nothing can be told from."""
        self._is_rich = False

    def refuse(self) -> None:
        """A step refused all offers."""
        self._refused += 1

    def take(self) -> None:
        """A step drafted."""
        self._refused = max(0, min(self._refused, SLEEPY) - AWAKE)

    def judge(self, tokens: float, plain_steps: float, gain: float, *, is_taken: bool) -> None:
        """Learn from a step with a look.

        tokens: that it brings for each request, as predicted: luck would hide what looking takes.
        plain_steps: how many steps of plain decoding would have taken as long as it took in fact.
        gain: of the step's drafts over plain decoding, as predicted. is_taken: there is one of a
            source of the host among them; else a network may draft, which needs no look. With
            several requests a network's drafts beside the host's count as won by the look.
        """
        if not is_taken:
            self._gain_without += (gain - self._gain_without) / LONG_RUN
        self._is_rich = is_taken and tokens > RICH * plain_steps
        self._num_judged += 1
        most = LONG_RUN if self._wins else LATELY
        worth = tokens - (1 + self._gain_without) * plain_steps
        self._worth += (worth - self._worth) / min(most, self._num_judged)
        turns = self._worth < LEAST if self._wins else self._worth > PROMISE
        if turns and self._num_judged >= most:
            self._wins, self._num_judged, self._worth = not self._wins, 0, 0.0
