"""Every byte the engine will use, counted before it is used."""

from dataclasses import dataclass

import psutil
import torch

from outdraft.config.engine import CacheConfig
from outdraft.core.errors import ConfigError
from outdraft.engine.cgroup import limited_groups
from outdraft.engine.step_memory import StepMemory

GPU_SHARE, CPU_SHARE = 0.9, 0.5  # of the memory, unless gpu_memory_utilization says otherwise


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is held, in bytes, and how many KV blocks that leaves room for.

    Attributes:
        numbers: what the target computes with, over which weights.
        target_weights, drafter_weights: as loaded, packed copies included.
        step: what the largest step takes.
        block_bytes: of one block, the target's and the drafter's layers together.
    """

    numbers: str
    target_weights: int
    drafter_weights: int
    step: StepMemory
    block_bytes: int
    num_blocks: int
    block_size: int

    def table(self) -> list[tuple[str, str]]:
        """Rows for people."""
        cache_bytes = self.block_bytes * self.num_blocks
        tokens = self.num_blocks * self.block_size
        parts = {
            f"target weights: {self.numbers}": self.target_weights,
            "drafter weights": self.drafter_weights,
            "texts on the device": self.step.texts,
            "activations of a full step": self.step.activations,
            "attention's temporaries": self.step.attention,
            "logits and sampling": self.step.sampling,
            "draft probabilities": self.step.draft_probs,
            "states for the drafter": self.step.states,
            f"KV cache: {self.num_blocks} blocks, {tokens} tokens": cache_bytes,
        }
        rows = {name: size for name, size in parts.items() if size > 0}
        rows["total"] = sum(parts.values())
        return [(name, _mebibytes(size)) for name, size in rows.items()]

    def __str__(self) -> str:
        """The table as lines of text."""
        rows = self.table()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {size:>14}" for name, size in rows)


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that a device has, and those that could be taken now.

    `default_share`: of gpu_memory_utilization. Others use a machine's RAM as well.
    """

    total: int
    free: int
    default_share: float


def device_memory(device: torch.device) -> DeviceMemory:
    """A GPU's memory; on a CPU the RAM, as far as this process's control groups let it have it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(total, free, GPU_SHARE)
    machine = psutil.virtual_memory()
    groups = list(limited_groups())
    return DeviceMemory(
        min([machine.total, *(group.limit for group in groups)]),
        max(0, min([machine.available, *(group.limit - group.used for group in groups)])),
        CPU_SHARE,
    )


def num_blocks(
    config: CacheConfig,
    *,
    block_bytes: int,
    useful_tokens: int,
    weights: int,
    buffers: int,
    memory: DeviceMemory,
) -> int:
    """Blocks of the pool: what was asked for, or what the share of the memory leaves.

    No more than `useful_tokens` (every request at its longest) are taken unasked. The default share
    is also one of what is free: nobody asked for the memory that others use.

    Raises:
        ConfigError: more was asked for than there is, or too little is left for one block.
    """
    if config.num_blocks is not None:
        wanted = config.num_blocks * block_bytes
    elif config.kv_cache_memory_bytes is not None:
        wanted = config.kv_cache_memory_bytes
    else:
        useful = -(-useful_tokens // config.block_size) * block_bytes
        share = config.gpu_memory_utilization or memory.default_share
        left = int(memory.total * share) - weights - buffers
        if config.gpu_memory_utilization is None:
            left = min(left, int((memory.free - buffers) * share))
        wanted = min(max(0, left), useful)
    if wanted + buffers > memory.free:
        raise ConfigError(
            f"the KV cache asks for {_mebibytes(wanted)} beside {_mebibytes(buffers)} of buffers, "
            f"but {_mebibytes(memory.free)} are free: lower gpu_memory_utilization, "
            "kv_cache_memory_bytes, num_blocks, max_num_seqs or max_num_batched_tokens"
        )
    count = wanted // block_bytes
    if count < 1:
        raise ConfigError(
            f"the KV cache gets {wanted} bytes, but one block takes {block_bytes}: raise "
            "kv_cache_memory_bytes or gpu_memory_utilization"
        )
    return count


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
