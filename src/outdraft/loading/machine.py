"""Describes this machine: its processor, its cores and the limits of its control groups."""

import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path


def processor() -> str:
    """The processor's name, from Linux or else from Python; "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; a source tree on the path is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of one rank.

    Attributes:
        cpus: logical processors that its threads stay on; (): any, as there are not enough.
    """

    num_threads: int
    cpus: tuple[int, ...] = ()


def cores_of_ranks(
    size: int, num_threads: int, topology: Mapping[int, tuple[int, int]]
) -> list[Cores]:
    """Cut the cores into equal, contiguous parts, so that ranks keep to their own socket.

    Args:
        num_threads: of all ranks together.
        topology: socket and core of each logical processor that they may use.
    """
    threads = max(1, num_threads // size)
    by_core: dict[tuple[int, int], list[int]] = {}
    for cpu, place in sorted(topology.items()):
        by_core.setdefault(place, []).append(cpu)
    cores = [by_core[place] for place in sorted(by_core)]
    if len(cores) < size:
        return [Cores(threads)] * size
    parts = [
        cores[rank * len(cores) // size : (rank + 1) * len(cores) // size] for rank in range(size)
    ]
    return [Cores(threads, tuple(sorted(chain.from_iterable(part)))) for part in parts]


def topology(folder: Path = CPUS) -> dict[int, tuple[int, int]]:
    """Socket and core of each logical processor of this thread; {} on systems without it."""
    if not hasattr(os, "sched_getaffinity"):
        return {}
    found: dict[int, tuple[int, int]] = {}
    for cpu in os.sched_getaffinity(0):
        place = folder / f"cpu{cpu}" / "topology"
        try:
            socket = int((place / "physical_package_id").read_text())
            core = int((place / "core_id").read_text())
        except (OSError, ValueError):
            return {}
        found[cpu] = socket, core
    return found


def stay_on(cpus: tuple[int, ...]) -> None:
    """Keep this thread, and those that it starts, on these processors; (): on any."""
    if cpus:
        os.sched_setaffinity(0, cpus)


ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
# Files of the limit and of the used bytes; the entry of memory.stat for those it can give back.
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def limited_groups(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[tuple[int, int]]:
    """Yield the bytes that each control group of this process may hold, and those that it holds,
    less those that it can give back: the groups with a limit, the inner ones first.

    In a container only the root may be visible.
    """
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        inner = top / path.strip("/")
        for folder in (inner, *inner.parents):
            if folder.is_relative_to(top):
                yield from _read(folder, *(_V1 if controllers else _V2))


def _read(folder: Path, limit_file: str, used_file: str, cached: str) -> Iterator[tuple[int, int]]:
    """Read a group; nothing if it has no limit, or cannot be read."""
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        entries = dict(
            line.split() for line in (folder / "memory.stat").read_text().splitlines() if line
        )
    except OSError:
        return
    if limit != "max":
        yield int(limit), max(0, used - int(entries.get(cached, 0)))
