"""How often the sources of the host look for drafts while their offers are refused."""

SLEEPY = 64  # steps in a row whose offers were all refused
SHARE = 0.01  # most of the time that looking for refused offers may take
LONGEST = 8  # steps between two looks, and
LONGEST_DEAR = 32  # where to decide takes long beside a step
AWAKE = 8  # steps that a draft keeps looks going for


class Looks:
    """Counts steps whose offers were all refused."""

    def __init__(self) -> None:
        self._refused = 0  # in a row, or nearly
        self._apart = 1  # steps between two looks

    def are_due(self, step: int) -> bool:
        """Whether to look; `step`: a number of steps that grows."""
        return self.due_in(step) == 0

    def due_in(self, step: int) -> int:
        """Steps until the next look."""
        return 0 if self._refused < SLEEPY else -step % self._apart

    def refuse(self, looking_share: float, deciding_share: float) -> None:
        """A step refused all offers; shares of a plain step that to look, and to decide, takes."""
        self._refused += 1
        self._apart = max(
            1,
            min(LONGEST, int(looking_share / SHARE)),
            min(LONGEST_DEAR, int(deciding_share / SHARE)),
        )

    def take(self) -> None:
        """A step drafted."""
        self._refused = max(0, min(self._refused, SLEEPY) - AWAKE)
