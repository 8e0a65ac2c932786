"""Counts every byte that the engine will use, before it is used.

The memory of a step, beside weights and KV cache, is counted at its largest, from shapes alone: at
the moment with most live tensors, in plain PyTorch; compiled paths take less. The parts are not
all needed at once, but an allocator keeps the memory that it once had.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import psutil
import torch

from outdraft.config.engine import CacheConfig, SchedulerConfig
from outdraft.core.draft import MAX_DRAFTS, TreeShape
from outdraft.core.errors import ConfigError
from outdraft.kernels.data.graph_sizes import (
    GRAPH_BYTES,
    GRAPHED_FUNCTIONS,
    MOST_ROWS,
    PASS_BYTES,
)
from outdraft.kernels.data.logits import (
    SCORED_LOGITS,
    SCORED_ON_DEVICE,
    most_drawn,
    most_logit_rows,
)
from outdraft.kernels.data.noise import NOISE_NUMBERS
from outdraft.models.shape import ModelShape
from outdraft.runner.logprobs import PROMPT_ROWS

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
GPU_SHARE, CPU_SHARE = 0.9, 0.5  # of the memory, unless gpu_memory_utilization says otherwise
CPU_CACHE_BYTES = 4 << 30  # of the KV cache at most, unless the configuration asks for more


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that a device has, and those that could be taken now.

    Attributes:
        default_share: of gpu_memory_utilization. Other programs use a machine's RAM as well.
        default_cache: most bytes of a KV cache without a configured size; None: no such limit.
    """

    total: int
    free: int
    default_share: float
    default_cache: int | None = None

    def part(self, number: int) -> "DeviceMemory":
        """One of `number` equal parts."""
        cache = None if self.default_cache is None else self.default_cache // number
        return DeviceMemory(self.total // number, self.free // number, self.default_share, cache)


def device_memory(device: torch.device) -> DeviceMemory:
    """A GPU's memory; on a CPU the RAM, as far as this process's control groups let it have it."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Memory that PyTorch holds and does not use is free to this process.
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
    """Bytes that a control group may hold, and holds, less those that it can give back."""

    limit: int
    used: int


# Files of the limit and of the used bytes; the entry of memory.stat for those it can give back.
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
    """Read the groups of a path. In a container only the root may be visible."""
    inner = root / path.strip("/")
    for folder in (inner, *inner.parents):
        if not folder.is_relative_to(root):
            return
        if (group := _read(folder, files)) is not None:
            yield group


def _read(folder: Path, files: _Files) -> GroupMemory | None:
    """Read a group; None: it has no limit, or cannot be read."""
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


NOISE_BYTES = 90  # for each number where noise is not compiled: 11 int64 and float64 tensors
# Tensors of logits where every sampling parameter is in use at the same time; and where penalties
# are compiled, which take most of them otherwise.
PROCESSING_TENSORS, FEWER_PROCESSING_TENSORS = 10, 5
# Rows of logits of the likeliest tokens that compiled steps keep between calls, as in
# csrc/best_tokens.cpp. They also keep those of a part, of the target and of the drafter.
BEST_ROWS = 64


@dataclass(frozen=True, slots=True)
class StepShape:
    """The largest step of an engine.

    Attributes:
        num_draft_rows: most drafts of the requests that this rank verifies; 0 without speculation.
            Drafts that clients predicted may be more, in the few steps without others.
        num_sampled: most drafts of one request that a network draws from its distribution, which is
            then kept; 0: it draws none.
        tree: of the drafter; its rows have no part in the scheduler's budget until
            they are verified.
        drafter_rows: fewest rows of a pass of the drafter.
        has_network: a network drafts.
        noise_is_compiled, penalties_are_compiled: they take no memory beside their result.
        num_ranks: that choose drafts and verify, each for an equal part of the requests.
    """

    scheduler: SchedulerConfig
    max_model_len: int
    num_draft_rows: int
    num_sampled: int
    dtype: torch.dtype
    device: torch.device
    tree: TreeShape | None = None
    drafter_rows: int = 0
    noise_is_compiled: bool = False
    penalties_are_compiled: bool = False
    num_ranks: int = 1
    has_network: bool = False

    @property
    def num_verified(self) -> int:
        """Most requests whose drafts this rank chooses and verifies. No draft group owns more than
        its part, since a request goes to the one that owns the fewest."""
        return -(-self.scheduler.max_num_seqs // self.num_ranks)

    @property
    def num_rows(self) -> int:
        """Most rows of one pass of the target or the drafter."""
        widest = self._widest * self.scheduler.max_num_seqs
        return max(self.scheduler.max_num_batched_tokens, widest, self.drafter_rows)

    @property
    def num_logit_rows(self) -> int:
        """Most rows that need logits on this rank, the target's or the drafter's."""
        verified = self.num_verified + self.num_draft_rows
        return min(max(verified, self.num_verified * max(1, self._widest)), self.num_rows)

    @property
    def num_own_rows(self) -> int:
        """Most of them that are of one request."""
        return min(self.num_logit_rows, 1 + MAX_DRAFTS if self.num_draft_rows else 1)

    @property
    def _widest(self) -> int:
        return max(self.tree.levels) if self.tree is not None else 0

    @property
    def logit_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes.

    Attributes:
        texts: token ids of the running requests on the device.
        activations: of a pass of most rows through the widest layer.
        attention: temporaries of the attention in that pass.
        sampling: logits, their processed copies, probabilities, noise.
        prompt_scores: logits of a prompt's tokens, for their log-probabilities.
        draft_probs: of the network's sampled drafts.
        states: of the target, on their way to a drafter that reads them.
        graphs: of a GPU, in memory of their own.
    """

    texts: int
    activations: int
    attention: int
    sampling: int
    prompt_scores: int
    draft_probs: int
    states: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        return sum(getattr(self, part.name) for part in fields(self))

    @property
    def kept(self) -> int:
        """Also between steps."""
        return self.texts + self.states + self.graphs


def activation_bytes(shape: StepShape, models: Sequence[ModelShape]) -> int:
    """Count the layers of the widest model; the models run one after the other.

    Args:
        models: the parts of this rank.
    """
    return shape.num_rows * max(_row_bytes(model, shape.dtype, shape.num_ranks) for model in models)


def sampling_bytes(shape: StepShape, vocab_size: int) -> int:
    """Count the tensors from logits to ids, for one part of the requests at a time.

    The rows of a part are processed in slices too, if one request has more of them.
    """
    width, most = shape.logit_dtype.itemsize, _part_rows(shape, vocab_size)
    rows = max(most, shape.num_own_rows)
    tensors = FEWER_PROCESSING_TENSORS if shape.penalties_are_compiled else PROCESSING_TENSORS
    processing = tensors * most + 2 * (rows - most)
    # Raw and processed logits and noise; residuals and weights where drafts were drawn.
    choosing = 3 * rows + 2 * min(rows, max(most, 1 + shape.num_sampled)) * (shape.num_sampled > 0)
    noise = 0 if shape.noise_is_compiled else NOISE_BYTES * min(rows * vocab_size, NOISE_NUMBERS)
    kept = 0
    if shape.penalties_are_compiled and shape.device.type == "cpu":
        kept = most + min(BEST_ROWS, shape.num_logit_rows) + most * shape.has_network
        kept += min(rows, 1 + shape.num_sampled) * (shape.num_sampled > 0)
    return max(processing * width, choosing * width + noise // vocab_size) * vocab_size + (
        kept * width * vocab_size
    )


def _part_rows(shape: StepShape, vocab_size: int) -> int:
    """Rows of logits that are processed at the same time."""
    return min(most_logit_rows(vocab_size, shape.logit_dtype, shape.device), shape.num_logit_rows)


def prompt_score_bytes(shape: StepShape, vocab_size: int) -> int:
    """Count the log-probabilities of a prompt, a slice at a time: logits as they are computed, as
    they arrive from other ranks, in the order of rows, and the scores of some of them. Added to
    those that are sampled, in whose memory they seldom fit."""
    own, width = shape.dtype.itemsize, shape.logit_dtype.itemsize
    most = most_logit_rows(vocab_size, shape.logit_dtype, shape.device)
    num_rows = -(-min(PROMPT_ROWS, most, shape.num_rows) // shape.num_ranks)
    scored = SCORED_LOGITS if shape.device.type == "cpu" else SCORED_ON_DEVICE
    scored = 4 * width * max(vocab_size, min(scored, num_rows * vocab_size))
    return num_rows * vocab_size * (own + (1 if shape.num_ranks == 1 else 3) * width) + scored


def draft_prob_bytes(shape: StepShape, vocab_size: int) -> int:
    """Count probabilities, always float32: of each draft of the network, stacked, and of a part of
    the requests among the drafts of the host."""
    if not shape.num_sampled:
        return 0
    made = min(shape.num_sampled * shape.num_verified, shape.num_rows)
    if shape.tree is not None:
        made = shape.num_verified * shape.tree.num_rows
    made = min(made, most_drawn(vocab_size, shape.device))
    most = most_logit_rows(vocab_size, shape.logit_dtype, shape.device)
    part = min(shape.num_draft_rows, max(most, MAX_DRAFTS))
    return (2 * made + part) * vocab_size * 4


def state_bytes(
    shape: StepShape, hidden_size: int, num_taps: int, feature_size: int, window: int
) -> int:
    """Count the tapped streams of a full step, side by side and once more as one; the features made
    of them; and the states that are kept of each running request.

    Args:
        feature_size: numbers made of a token's states; 0: they are kept as they are.
        window: tokens of each request whose states are kept.
    """
    row = 2 * num_taps * hidden_size + 2 * feature_size
    kept = (shape.scheduler.max_num_seqs * window + 1) * (feature_size or hidden_size)
    return (shape.num_rows * row + kept) * shape.dtype.itemsize


def graph_bytes(shape: StepShape, models: Sequence[ModelShape], vocab_size: int) -> int:
    """Count the graphs of passes of few rows, drafting and verification, with their inputs."""
    rows = min(shape.num_rows, MOST_ROWS)
    passes = rows * sum(_row_bytes(model, shape.dtype, shape.num_ranks) for model in models)
    made = sampling_bytes(shape, vocab_size) + draft_prob_bytes(shape, vocab_size)
    return passes + made + GRAPHED_FUNCTIONS * GRAPH_BYTES + len(models) * PASS_BYTES


def text_bytes(shape: StepShape) -> int:
    """Count int64 ids, with the column that DeviceState has after the longest text."""
    return shape.scheduler.max_num_seqs * (shape.max_model_len + 1) * 8


def _row_bytes(model: ModelShape, dtype: torch.dtype, num_ranks: int) -> int:
    """Bytes of one row in the middle of a layer, its residual included."""
    own, wide = dtype.itemsize, torch.promote_types(dtype, torch.float32).itemsize
    hidden = model.hidden_size
    queries = model.num_heads * model.head_size
    qkv = queries + 2 * model.num_kv_heads * model.head_size
    norm = 3 * hidden * own + 3 * hidden * wide
    rotary = (2 * hidden + qkv) * own + 4 * queries * wide
    attention = (2 * hidden + 2 * qkv) * own + queries * (own + wide)
    feed_forward = (3 * hidden + 4 * model.intermediate_size) * own
    feed_forward += 2 * model.intermediate_size * wide
    # Where ranks sum: the parts of all of them, side by side once more as they arrive, or with the
    # tensors of their sum.
    summed = 0
    if num_ranks > 1:
        summed = (4 * hidden + max(2 * qkv, model.intermediate_size)) * own
        summed += num_ranks * hidden * own + max(num_ranks * own, 3 * wide) * hidden
    most = max(norm, rotary, attention, feed_forward, summed)
    return model.head_size * wide + most  # angles: all along


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one of several ranks holds, and more that it could hold if the others could."""

    total: int
    idle: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The engine's memory in bytes, and the number of KV blocks that fit beside the rest.

    Attributes:
        numbers: the target's number formats, of its products and of its weights.
        target_weights, drafter_weights: as loaded, packed copies included.
        step: of the largest step.
        block_bytes: of one block, the target's and the drafter's layers together.
        cache_limit: most bytes of a cache without a configured size; None: it has one, or the
            device has no such limit.
        ranks: of all ranks, if there are several; the other numbers are those of the first one.
    """

    numbers: str
    target_weights: int
    drafter_weights: int
    step: StepMemory
    block_bytes: int
    num_blocks: int
    block_size: int
    cache_limit: int | None = None
    ranks: tuple[RankMemory, ...] = ()

    @property
    def total(self) -> int:
        weights = self.target_weights + self.drafter_weights
        return weights + self.step.total + self.block_bytes * self.num_blocks

    def agreed(self, others: Sequence["MemoryPlan"]) -> "MemoryPlan":
        """This rank's plan with as many blocks as all ranks have room for."""
        plans = [self, *others]
        fewest = min(plan.num_blocks for plan in plans)
        ranks = tuple(
            RankMemory(
                replace(plan, num_blocks=fewest).total,
                (plan.num_blocks - fewest) * plan.block_bytes,
            )
            for plan in plans
        )
        return replace(self, num_blocks=fewest, ranks=ranks)

    def table(self) -> list[tuple[str, str]]:
        """Rows of (name, size) for people."""
        cache_bytes = self.block_bytes * self.num_blocks
        cache = f"KV cache: {self.num_blocks} blocks, {self.num_blocks * self.block_size} tokens"
        if self.cache_limit is not None and cache_bytes + self.block_bytes > self.cache_limit:
            cache += f" (at most {_mebibytes(self.cache_limit)} unless kv_cache_memory_bytes says)"
        parts = {
            f"target weights: {self.numbers}": self.target_weights,
            "drafter weights": self.drafter_weights,
            "texts on the device": self.step.texts,
            "activations of a full step": self.step.activations,
            "attention's temporaries": self.step.attention,
            "logits and sampling": self.step.sampling,
            "log-probabilities of prompts": self.step.prompt_scores,
            "draft probabilities": self.step.draft_probs,
            "states for the drafter": self.step.states,
            "graphs of the GPU": self.step.graphs,
            cache: cache_bytes,
        }
        rows = {name: size for name, size in parts.items() if size > 0}
        rows["total"] = self.total
        for rank, memory in enumerate(self.ranks):
            rows[f"rank {rank} in all"] = memory.total
            rows[f"rank {rank} leaves idle"] = memory.idle
        return [(name, _mebibytes(size)) for name, size in rows.items()]

    def __str__(self) -> str:
        """The table as lines of text."""
        rows = self.table()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {size:>14}" for name, size in rows)


def num_blocks(
    config: CacheConfig,
    *,
    block_bytes: int,
    useful_tokens: int,
    weights: int,
    buffers: int,
    memory: DeviceMemory,
) -> int:
    """Count the blocks of the pool: as configured, or as the share of the memory leaves room for.

    Without a configured size the pool has at most `useful_tokens` (every request at its longest),
    and without a configured share at most the device's default for a cache. The default share is
    also one of the free memory, as other programs use the rest.

    Raises:
        ConfigError: the configured size is more than is free, or less than 1 block is left.
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
            left = min(left, memory.default_cache or left)
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
