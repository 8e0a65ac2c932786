"""What this machine does at most: bytes a second from memory, operations a second in registers."""

import mmap
import time
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import numpy as np

from outdraft.kernels.native.team import Team

MULTIPLY_UNITS = 256


class Limits:
    """Readings of both limits, with all threads of a team.

    Memory is read in huge pages where the system has them. Operations are products and sums, two
    for each pair of numbers.
    """

    def __init__(
        self,
        team: Team,
        *,
        is_bf16: bool,
        read_bytes: int = 1 << 30,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            is_bf16: bfloat16 is multiplied, where the processor can; else float32.
            read_bytes: of a reading; far more than the caches hold.
            clock: seconds.
        """
        self._team, self._is_bf16, self._clock = team, is_bf16, clock
        self._num_bytes = read_bytes
        self._memory = mmap.mmap(-1, read_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._words = np.frombuffer(self._memory, dtype=np.int64)
        self._words[:] = 1
        function = team.library.function
        self._read = function(
            "roofline_read", [c_void_p, c_void_p, c_int64], c_int64, releases_gil=True
        )
        self._multiply = function(
            "roofline_multiply", [c_void_p, c_int64, c_int64], c_int64, releases_gil=True
        )

    def bandwidth(self) -> float:
        """One reading, bytes/s."""
        start_s = self._clock()
        self._read(self._team.address, self._words.ctypes.data, self._num_bytes)
        return self._num_bytes / (self._clock() - start_s)

    def peak(self) -> float:
        """One reading, operations/s."""
        start_s = self._clock()
        operations = self._multiply(self._team.address, int(self._is_bf16), MULTIPLY_UNITS)
        return operations / (self._clock() - start_s)
