"""Steps for which nobody is asked who drafts.

While a plain decision stands, and nothing is to be learned or looked for in the steps to come, even
to ask whether it does takes a hundredth of a small model's step.
"""


class Rest:
    """Counts them.

    Attributes:
        is_on: the step that runs is one of them.
    """

    def __init__(self) -> None:
        self.is_on = False
        self._batch = 0, 0
        self._left = 0

    def take(self, num_running: int, num_waiting: int) -> bool:
        """Whether the step that begins with so many requests is one of them."""
        batch = num_running, num_waiting
        if batch != self._batch:
            self._batch, self._left = batch, 0
        self.is_on = self._left > 0
        self._left -= self.is_on
        return self.is_on

    def begin(self, num_steps: int) -> None:
        """So many steps that follow the one that runs may be, if their batch is its own."""
        self._left = num_steps

    def end(self) -> None:
        """A request ended: none that follow are."""
        self._left = 0
