"""Counts every byte that the engine will use, before it is used.

The memory of a step, beside weights and KV cache, is counted at its largest, from shapes alone: at
the moment with most live tensors, in plain PyTorch; compiled paths take less. The parts are not
all needed at once, but an allocator keeps the memory that it once had.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import psutil
import torch

from outdraft.attention.base import AttentionSizes
from outdraft.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from outdraft.config.speculation import AUTO, SpeculationConfig
from outdraft.core.draft import MAX_DRAFTS, TreeShape
from outdraft.core.errors import ConfigError
from outdraft.drafting.request_limits import most_draft_rows
from outdraft.kernels.choose import computed_by, has_graphs
from outdraft.kernels.data.graph_sizes import GRAPH_BYTES, GRAPHED_FUNCTIONS, MOST_ROWS, PASS_BYTES
from outdraft.kernels.data.logits import (
    SCORED_LOGITS,
    SCORED_ON_DEVICE,
    most_drawn,
    most_logit_rows,
)
from outdraft.kernels.data.noise import NOISE_NUMBERS
from outdraft.loading.machine import limited_groups
from outdraft.loading.methods import LoadedDrafter, Network, cache_bytes
from outdraft.loading.models import LoadedModels
from outdraft.models.shape import ModelShape
from outdraft.runner.logprobs import PROMPT_ROWS

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
        min([machine.total, *(limit for limit, _ in groups)]),
        max(0, min([machine.available, *(limit - used for limit, used in groups)])),
        CPU_SHARE,
        CPU_CACHE_BYTES,
    )


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
    def _widest(self) -> int:
        return max(self.tree.levels) if self.tree is not None else 0

    @property
    def logit_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)


# The parts of a step's memory that are kept between steps. Graphs have memory of their own.
TEXTS, STATES, GRAPHS = "texts on the device", "states for the drafter", "graphs of the GPU"
SAMPLING, DRAFT_PROBS = "logits and sampling", "draft probabilities"
_KEPT = {TEXTS, STATES, GRAPHS}


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
    width = shape.logit_dtype.itemsize
    most = min(most_logit_rows(vocab_size, shape.logit_dtype, shape.device), shape.num_logit_rows)
    # At least those of one request.
    rows = max(most, min(shape.num_logit_rows, 1 + MAX_DRAFTS if shape.num_draft_rows else 1))
    drawn = 1 + shape.num_sampled if shape.num_sampled else 0  # of one request
    tensors = FEWER_PROCESSING_TENSORS if shape.penalties_are_compiled else PROCESSING_TENSORS
    processing = tensors * most + 2 * (rows - most)
    # Raw and processed logits and noise; residuals and weights where drafts were drawn.
    choosing = 3 * rows + (2 * min(rows, max(most, drawn)) if drawn else 0)
    noise = 0 if shape.noise_is_compiled else NOISE_BYTES * min(rows * vocab_size, NOISE_NUMBERS)
    kept = 0
    if shape.penalties_are_compiled and shape.device.type == "cpu":
        kept = most + min(BEST_ROWS, shape.num_logit_rows) + most * shape.has_network
        kept += min(rows, drawn)
    needed = max(processing * width, choosing * width + noise // vocab_size)
    return (needed + kept * width) * vocab_size


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


def state_bytes(shape: StepShape, models: LoadedModels) -> int:
    """Count the tapped streams of a full step, side by side and once more as one; the features made
    of them; the states that are kept of each running request; and its blocks beside the pool."""
    drafter, hidden_size = models.drafter, models.target.config.hidden_size
    if drafter is None or not drafter.state_window:
        return 0
    features, block_size = drafter.feature_size, models.config.cache.block_size
    num_seqs = shape.scheduler.max_num_seqs
    row = 2 * drafter.num_taps * hidden_size + 2 * features
    kept = (num_seqs * drafter.state_window + 1) * (features or hidden_size)
    spare = num_seqs * drafter.spare_blocks(block_size) * drafter.bytes_per_block(block_size)
    return (shape.num_rows * row + kept) * shape.dtype.itemsize + spare


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
    norm = 3 * hidden * (own + wide)
    rotary = (2 * hidden + qkv) * own + 4 * queries * wide
    attention = (2 * hidden + 2 * qkv) * own + queries * (own + wide)
    feed_forward = 3 * hidden * own + model.intermediate_size * (4 * own + 2 * wide)
    # Where ranks sum: the parts of all of them, side by side once more as they arrive, or with the
    # tensors of their sum.
    summed = 0
    if num_ranks > 1:
        summed = (4 * hidden + max(2 * qkv, model.intermediate_size)) * own
        summed += num_ranks * hidden * own + max(num_ranks * own, 3 * wide) * hidden
    most = max(norm, rotary, attention, feed_forward, summed)
    return model.head_size * wide + most  # angles: all along


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The engine's memory in bytes, and the number of KV blocks that fit beside the rest.

    Attributes:
        numbers: the target's number formats, of its products and of its weights.
        target_weights, drafter_weights: as loaded, packed copies included.
        step: of the largest step, by the names of its parts.
        block_bytes: of one block, the target's and the drafter's layers together.
        cache_limit: most bytes of a cache without a configured size; None: it has one, or the
            device has no such limit.
        ranks: the plans of all ranks, if there are several, before they agreed on the number of
            blocks; the other numbers are those of the first one.
    """

    numbers: str
    target_weights: int
    drafter_weights: int
    step: Mapping[str, int]
    block_bytes: int
    num_blocks: int
    block_size: int
    cache_limit: int | None = None
    ranks: tuple["MemoryPlan", ...] = ()

    @property
    def total(self) -> int:
        weights = self.target_weights + self.drafter_weights
        return weights + sum(self.step.values()) + self.block_bytes * self.num_blocks

    def agreed(self, others: Sequence["MemoryPlan"]) -> "MemoryPlan":
        """This rank's plan with as many blocks as all ranks have room for."""
        plans = self, *others
        return replace(self, num_blocks=min(plan.num_blocks for plan in plans), ranks=plans)

    def table(self) -> list[tuple[str, str]]:
        """Rows of (name, size) for people."""
        cache_bytes = self.block_bytes * self.num_blocks
        cache = f"KV cache: {self.num_blocks} blocks, {self.num_blocks * self.block_size} tokens"
        if self.cache_limit is not None and cache_bytes + self.block_bytes > self.cache_limit:
            cache += f" (at most {_mebibytes(self.cache_limit)} unless kv_cache_memory_bytes says)"
        parts = {
            f"target weights: {self.numbers}": self.target_weights,
            "drafter weights": self.drafter_weights,
            **self.step,
            cache: cache_bytes,
        }
        rows = {name: size for name, size in parts.items() if size > 0}
        rows["total"] = self.total
        for rank, plan in enumerate(self.ranks):
            held = replace(plan, num_blocks=self.num_blocks).total
            rows[f"rank {rank} in all"] = held
            rows[f"rank {rank} leaves idle"] = plan.total - held
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


def plan_memory(config: EngineConfig, models: LoadedModels) -> MemoryPlan:
    """Plan a single engine, before anything but its weights is allocated.

    With several ranks it is that of this one. Ranks on CPUs have equal parts of the machine's
    memory.

    Raises:
        ConfigError: such an engine cannot be built, or its memory is not there.
    """
    memory = device_memory(models.device)
    if models.device.type == "cpu":
        memory = memory.part(models.ranks.target.size)
    return plan_together([(config, models)], memory)[0]


def plan_together(
    engines: Sequence[tuple[EngineConfig, LoadedModels]], memory: DeviceMemory
) -> list[MemoryPlan]:
    """Plan engines on one device that exist at the same time and step in turn.

    Weights count once, and so do tensors of steps. The rest is for all in equal parts. An engine
    with a configured number of blocks or bytes gets that.

    Raises:
        ConfigError: one of them cannot be built, or there is too little memory for them.
    """
    used = [models.as_used_by(config) for config, models in engines]
    steps = [_step_memory(models) for models in used]
    weights = {id(one): one.memory_bytes for models in used for one in _networks(models)}
    number = len(engines)
    kept = [sum(size for part, size in step.items() if part in _KEPT) for step in steps]
    shared = max(sum(step.values()) - own for step, own in zip(steps, kept, strict=True))
    plans: list[MemoryPlan] = []
    for models, step, own in zip(used, steps, kept, strict=True):
        config, target, drafter = models.config, models.target, models.drafter
        size = config.cache.block_size
        block_bytes = cache_bytes(target.shard, size, target.dtype)
        block_bytes += drafter.bytes_per_block(size) if drafter else 0
        count = num_blocks(
            config.cache,
            block_bytes=block_bytes,
            useful_tokens=config.scheduler.max_num_seqs * models.longest_text,
            weights=sum(weights.values()) // number,
            buffers=own + shared // number,
            memory=memory.part(number),
        )
        plans.append(
            MemoryPlan(
                target.numbers,
                target.memory_bytes,
                sum(one.memory_bytes for one in _networks(models) if one is not target),
                step,
                block_bytes,
                count,
                size,
                None if config.cache.has_size else memory.part(number).default_cache,
            )
        )
    return plans


def _networks(models: LoadedModels) -> list[Network]:
    """The target, and the network that drafts; it may be the target."""
    return [models.target] if models.drafter is None else [models.target, models.drafter.network]


def _step_memory(models: LoadedModels) -> dict[str, int]:
    """Bytes of the largest step by the names of its parts: of passes of most rows, from token ids
    to verified drafts."""
    config, target, drafter = models.config, models.target, models.drafter
    scheduler, speculation = config.scheduler, config.speculation
    network = speculation.network
    vocab_size, max_model_len = target.config.vocab_size, models.longest_text
    _check_num_drafts(speculation, drafter, vocab_size)
    layers = [target.shard]
    if drafter is not None and drafter.layers is not None:
        layers.append(drafter.layers)
    num_ranks, computed = models.ranks.target.size, computed_by(models.kernels)
    shape = StepShape(
        scheduler,
        max_model_len,
        num_draft_rows=most_draft_rows(speculation, -(-scheduler.max_num_seqs // num_ranks)),
        num_sampled=speculation.max_drafts if network is not None and network.samples else 0,
        dtype=target.dtype,
        device=models.device,
        tree=network.tree if network is not None else None,
        drafter_rows=drafter.block_rows if drafter is not None else 0,
        noise_is_compiled=not computed["gumbel"].startswith("reference."),
        penalties_are_compiled=not computed["penalize"].startswith("reference."),
        num_ranks=num_ranks,
        has_network=network is not None,
    )
    most = scheduler.max_num_seqs, shape.num_rows, max_model_len
    attention = max(
        models.kernels.attention.temporary_bytes(
            AttentionSizes(*most, one.num_heads, cache, target.dtype)
        )
        for one in layers
        for cache in set(one.cache_shapes)
    )
    return {
        TEXTS: text_bytes(shape),
        "activations of a full step": activation_bytes(shape, layers),
        "attention's temporaries": attention,
        SAMPLING: sampling_bytes(shape, vocab_size),
        "log-probabilities of prompts": prompt_score_bytes(shape, vocab_size),
        DRAFT_PROBS: draft_prob_bytes(shape, vocab_size),
        STATES: state_bytes(shape, models),
        GRAPHS: graph_bytes(shape, layers, vocab_size) if has_graphs(models.kernels) else 0,
    }


def _check_num_drafts(
    config: SpeculationConfig, drafter: LoadedDrafter | None, vocab_size: int
) -> None:
    """Raise ConfigError if the network cannot draft that deep. Beside other sources it may: its
    chains are cut instead."""
    network = config.network
    if network is None or drafter is None:
        return
    depth, most = config.num_speculative_tokens, drafter.max_drafts
    if network.tree is not None:
        depth = network.tree.depth
        if max(network.tree.levels) > vocab_size:
            raise ConfigError(
                f"a level of the tree has {max(network.tree.levels)} rows, but the vocabulary of "
                f"the target {vocab_size} tokens"
            )
    elif depth == AUTO or len(config.sources) > 1:
        return
    if depth > most:
        name = f" {network.model!r}" if network.model else ""
        what = "drafts" if drafter.layers else f"has {most} heads, so it drafts"
        raise ConfigError(
            f"{network.source}{name} {what} no further than "
            f"{most} tokens ahead: lower num_speculative_tokens or the depth of the tree"
        )
