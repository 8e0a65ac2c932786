"""What the control groups of Linux leave to this process of the machine's memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Bytes that a group may hold, and those that it holds without what can be given back."""

    limit: int
    used: int


@dataclass(frozen=True, slots=True)
class _Files:
    limit: str
    used: str
    cached: str  # the entry of memory.stat


_V2 = _Files("memory.max", "memory.current", "inactive_file")
_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def limited_groups(root: Path = ROOT, membership: Path = MEMBERSHIP) -> Iterator[GroupMemory]:
    """Every group of this process that has a limit, the inner ones first; none without groups."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            yield from _groups(root, path, _V2)
        elif "memory" in controllers.split(","):
            yield from _groups(root / "memory", path, _V1)


def _groups(root: Path, path: str, files: _Files) -> Iterator[GroupMemory]:
    """In a container the path may be the machine's, and only the root is to be seen."""
    inner = root / path.strip("/")
    for folder in (inner, *inner.parents):
        if not folder.is_relative_to(root):
            return
        if (group := _read(folder, files)) is not None:
            yield group


def _read(folder: Path, files: _Files) -> GroupMemory | None:
    """None: the group has no limit, or cannot be read."""
    try:
        limit = (folder / files.limit).read_text().strip()
        used = int((folder / files.used).read_text())
        entries = dict(
            line.split() for line in (folder / "memory.stat").read_text().splitlines() if line
        )
    except OSError:
        return None
    if limit == "max":
        return None
    return GroupMemory(int(limit), max(0, used - int(entries.get(files.cached, 0))))
