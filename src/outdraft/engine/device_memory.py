"""The memory that a device has for this process."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
GPU_SHARE, CPU_SHARE = 0.9, 0.5  # of the memory, unless gpu_memory_utilization says otherwise
CPU_CACHE_BYTES = 4 << 30  # of the KV cache at most, unless someone asks for more


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that a device has, and those that could be taken now.

    Attributes:
        default_share: of gpu_memory_utilization. Others use a machine's RAM as well.
        default_cache: of a KV cache at most, if nobody asks for another size; None: no such limit.
    """

    total: int
    free: int
    default_share: float
    default_cache: int | None = None

    def part(self, number: int) -> "DeviceMemory":
        """One of so many equal parts."""
        cache = None if self.default_cache is None else self.default_cache // number
        return DeviceMemory(self.total // number, self.free // number, self.default_share, cache)


def device_memory(device: torch.device) -> DeviceMemory:
    """A GPU's memory; on a CPU the RAM, as far as this process's control groups let it have it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # What PyTorch holds and nobody uses is free to this process.
        free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return DeviceMemory(total, free, GPU_SHARE)
    machine = psutil.virtual_memory()
    groups = list(limited_groups())
    return DeviceMemory(
        min([machine.total, *(group.limit for group in groups)]),
        max(0, min([machine.available, *(group.limit - group.used for group in groups)])),
        CPU_SHARE,
        CPU_CACHE_BYTES,
    )


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """Bytes that a control group may hold, and those that it holds; not what can be given back."""

    limit: int
    used: int


# Files of the limit and of what is used; the entry of memory.stat for what can be given back.
_Files = tuple[str, str, str]
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


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
    limit_file, used_file, cached = files
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        entries = dict(
            line.split() for line in (folder / "memory.stat").read_text().splitlines() if line
        )
    except OSError:
        return None
    if limit == "max":
        return None
    return GroupMemory(int(limit), max(0, used - int(entries.get(cached, 0))))
