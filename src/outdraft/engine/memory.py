"""Every byte the engine will use, counted before it is used."""

from dataclasses import dataclass

import psutil
import torch

from outdraft.config.engine import CacheConfig
from outdraft.core.errors import ConfigError
from outdraft.engine.step_memory import StepMemory


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What is held, in bytes, and how many KV blocks that leaves room for.

    Attributes:
        target_weights, drafter_weights: as loaded, packed copies included.
        step: what the largest step takes.
        block_bytes: of one block, the target's and the drafter's layers together.
    """

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
            "target weights": self.target_weights,
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


def free_bytes(device: torch.device) -> int:
    """Memory that could be taken now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def num_blocks(
    config: CacheConfig, *, block_bytes: int, useful_tokens: int, buffers: int, free: int
) -> int:
    """Blocks of the pool: what was asked for, or a share of what is free.

    No more than `useful_tokens` (every request at its longest) are taken unasked.

    Raises:
        ConfigError: more was asked for than there is, or too little is left for one block.
    """
    if config.num_blocks is not None:
        wanted = config.num_blocks * block_bytes
    elif config.kv_cache_memory_bytes is not None:
        wanted = config.kv_cache_memory_bytes
    else:
        useful = -(-useful_tokens // config.block_size) * block_bytes
        wanted = min(int(max(0, free - buffers) * config.memory_fraction), useful)
    if wanted + buffers > free:
        raise ConfigError(
            f"the KV cache asks for {_mebibytes(wanted)} beside {_mebibytes(buffers)} of buffers, "
            f"but {_mebibytes(free)} are free: lower kv_cache_memory_bytes, num_blocks, "
            "max_num_seqs or max_num_batched_tokens"
        )
    count = wanted // block_bytes
    if count < 1:
        raise ConfigError(
            f"the KV cache gets {wanted} bytes, but one block takes {block_bytes}: raise "
            "kv_cache_memory_bytes or memory_fraction"
        )
    return count


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
