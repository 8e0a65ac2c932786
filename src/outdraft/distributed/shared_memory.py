"""Makes memory that the ranks of a machine share."""

import logging
import os
from contextlib import ExitStack, suppress
from datetime import timedelta
from mmap import mmap
from pathlib import Path
from typing import IO, Protocol

from torch._C._distributed_c10d import Store  # torch.distributed does not name it

from outdraft.distributed.group import Transport

BOOT = Path("/proc/sys/kernel/random/boot_id")  # of Linux
NOWHERE, YES, NO = "", "yes", "no"
_logger = logging.getLogger(__name__)


class MemoryTransports(Protocol):
    """Makes transports over memory that ranks share."""

    def num_bytes(self, size: int) -> int:
        """The memory that a group of that size needs."""
        ...

    def transport(self, memory: mmap, rank: int, size: int, timeout_s: float) -> Transport:
        """The transport of one rank. The memory holds zeros before the first rank has one."""
        ...


def shared_memory(
    store: Store,
    rank: int,
    size: int,
    num_bytes: int | None,
    timeout: timedelta,
    host: str = "127.0.0.1",
) -> mmap | None:
    """Make memory that all ranks see, zeros at first; None on all ranks: one cannot see it.

    It has no name once the ranks have met, and ends with their processes.

    Args:
        store: of this group alone.
        num_bytes: None: this rank can use none.
        host: address of this rank's machine, the same for all ranks that share memory.

    Raises:
        RuntimeError: another rank did not come in time.
    """
    with ExitStack() as until_all_have_it:
        memory = None
        try:
            if num_bytes is not None and rank == 0:
                opened = open(os.memfd_create("outdraft-ranks"), "r+b")  # noqa: SIM115
                file = until_all_have_it.enter_context(opened)
                file.truncate(num_bytes)
                memory = mmap(file.fileno(), num_bytes)
                store.set("place", _place(file, f"/proc/{os.getpid()}/fd/{file.fileno()}", host))
            elif num_bytes is not None:
                store.wait(["place"], timeout)
                memory = _opened(store.get("place").decode(), num_bytes, host)
        except OSError as error:
            _logger.warning("rank %d of %d cannot share memory: %s", rank, size, error)
        if rank == 0 and memory is None:
            store.set("place", NOWHERE)
        store.set(f"has-{rank}", NO if memory is None else YES)
        answers = [f"has-{other}" for other in range(size)]
        store.wait(answers, timeout)
        return memory if all(store.get(name).decode() == YES for name in answers) else None


def _opened(place: str, num_bytes: int, host: str) -> mmap | None:
    """Map the memory; None: the place is on another machine, or in another container."""
    if place == NOWHERE:
        return None
    machine, _, _, path = place.split(" ", 3)
    if machine != _machine(host):
        return None
    with suppress(FileNotFoundError), open(path, "r+b") as file:
        if _place(file, path, host) == place:
            return mmap(file.fileno(), num_bytes)
    return None


def _place(file: IO[bytes], path: str, host: str) -> str:
    """A text that names one file of one machine, and its path."""
    status = os.fstat(file.fileno())
    return f"{_machine(host)} {status.st_dev} {status.st_ino} {path}"


def _machine(host: str) -> str:
    with suppress(OSError):
        return f"{host}/{BOOT.read_text().strip()}"
    return host
