"""Threads of our own that share a product of microseconds.

Waking a thread takes longer than a small product. So a helper looks for the next product for about
a tenth of a millisecond before it sleeps. The caller never waits for a helper: a helper that lost
its core to another process delays nothing, see linear_kernels.py. For the same reason a forked
process, which has no helpers, computes correctly.
"""

import functools
import os
import threading
import time
import weakref

import torch
from torch import Tensor

from outdraft.models.layers import linear_kernels as kernels


class Team:
    """The calling thread and its helpers. One product at a time; a second caller works alone.

    Attributes:
        address: for the kernels.
    """

    def __init__(self, num_helpers: int) -> None:
        self.num_helpers = num_helpers
        size = kernels.team_words(num_helpers)
        self._words = torch.zeros(size, dtype=torch.int64)
        self._words[kernels.NUM_HELPERS] = num_helpers
        self._blocks: list[Tensor] = []  # a late helper may still read an older one
        self.address = self._words.data_ptr()

    def start(self) -> None:
        """Start the helpers; they end with the process, or with this object."""
        for helper in range(self.num_helpers):
            wake_fd, write_fd = os.pipe()
            self._words[kernels.helper_word(helper, kernels.WAKE_READ)] = wake_fd
            self._words[kernels.helper_word(helper, kernels.WAKE_WRITE)] = write_fd
            args = (self._words, helper)
            thread = threading.Thread(target=_serve, args=args, daemon=True, name="outdraft-linear")
            weakref.finalize(self, _stop, self._words, (wake_fd, write_fd), thread)
            thread.start()

    def reserve(self, num_inputs: int) -> None:
        """Make room for products of this many inputs."""
        if num_inputs > int(self._words[kernels.BLOCK_INPUTS]):
            self._blocks.append(torch.empty(kernels.block_numbers(num_inputs)))
            self._words[kernels.BLOCK] = self._blocks[-1].data_ptr()
            self._words[kernels.BLOCK_INPUTS] = num_inputs

    def lend(self, owner: object, weights: Tensor) -> None:
        """Keep the weights of an owner that is gone until no late helper reads them."""
        places = [kernels.helper_word(i, kernels.WORKS_ON) for i in range(self.num_helpers)]
        end = weakref.finalize(owner, _let_go, self._words, places, os.getpid(), weights)
        end.atexit = False


@functools.cache
def shared_team(num_threads: int) -> Team | None:
    """The team of this process, as the cores are there once; None if one thread is to compute."""
    if num_threads == 1 or os.name != "posix":
        return None
    team = Team(num_threads - 1)
    team.start()
    return team


def _serve(words: Tensor, helper: int) -> None:
    kernels.help_team(words.data_ptr(), helper)


def _stop(words: Tensor, pipe_fds: tuple[int, int], thread: threading.Thread) -> None:
    words[kernels.JOB] = kernels.STOP
    wake_fd, write_fd = pipe_fds
    os.close(write_fd)
    thread.join()
    os.close(wake_fd)


def _let_go(words: Tensor, places: list[int], process_id: int, weights: Tensor) -> None:
    """Return when every helper is behind the job that it was on, if any: `weights` ends with us."""
    if os.getpid() != process_id:  # forked: the helpers are not here
        return
    for place in places:
        job = int(words[place])
        while job != 0 and int(words[place]) == job:
            time.sleep(0.001)
