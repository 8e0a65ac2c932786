"""Where the device's part of a step goes.

On a GPU the marks are events that are read after the step has been collected, so taking the time
never waits for the device.
"""

import operator
import time
from typing import Any

import torch

from outdraft.core.plan import PhaseTimes
from outdraft.kernels.ops import WarmUps


class PhaseClock:
    """Marks in the order they were set; `times` after the device has passed them all."""

    def __init__(self, device: torch.device, warm_ups: WarmUps) -> None:
        """`warm_ups`: of the kernels; steps with some are marked."""
        # The stream is asked for once: to look for it takes longer than to record an event.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._marks: list[Any] = []  # seconds, or events of a GPU
        self._warm_ups, self._number_before = warm_ups, warm_ups.count
        self._is_first = False

    def mark(self) -> None:
        """A phase begins: drafting, the target's pass, what follows it, and of that, maybe, keeping
        states; or the last one is over."""
        if self._stream is None:
            self._marks.append(time.perf_counter())
        else:
            self._marks.append(self._stream.record_event(torch.cuda.Event(enable_timing=True)))
        self._is_first = self._warm_ups.count != self._number_before

    def times(self) -> PhaseTimes:
        """The phases between the marks."""
        between = operator.sub if self._stream is None else _event_seconds
        draft_s, verify_s, sample_s, *kept = map(between, self._marks[1:], self._marks)
        keep_s = sum(kept)
        return PhaseTimes(draft_s, verify_s, sample_s + keep_s, keep_s, self._is_first)


def _event_seconds(stop: torch.cuda.Event, start: torch.cuda.Event) -> float:
    return start.elapsed_time(stop) / 1000
