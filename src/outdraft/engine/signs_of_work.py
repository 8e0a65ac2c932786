"""A rank that loads says nothing for minutes; meanwhile it shows that it works.

Only a rank itself can tell slow from stuck, on any machine and for any step of loading: by what the
system counts of its process.
"""

import resource
import threading

from outdraft.distributed.channel import Listener
from outdraft.engine.rank_messages import Working, as_bytes

BEAT_S = 1.0
LEAST_CPU_SHARE = 0.01  # of one core; the beats themselves take less


class SignsOfWork:
    """While it is open, rank 0 is told every second in which this process has computed or read.

    Nobody else may use the listener meanwhile.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="signs-of-work", daemon=True)

    def __enter__(self) -> "SignsOfWork":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _beat(self) -> None:
        cpu_s, num_reads = _used()
        while not self._is_over.wait(BEAT_S):
            (before_s, before), (cpu_s, num_reads) = (cpu_s, num_reads), _used()
            if cpu_s - before_s > LEAST_CPU_SHARE * BEAT_S or num_reads > before:
                self._listener.send(as_bytes(Working()))


def _used() -> tuple[float, int]:
    """Seconds of cores, and how often this process got something from a disk, files that are mapped
    into memory included."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime, used.ru_inblock + used.ru_majflt
