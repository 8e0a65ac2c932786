"""Plans the memory of engines that run side by side, before the first one; builds their runners."""

from collections.abc import Sequence

from outdraft.attention.base import AttentionSizes
from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import AUTO, SpeculationConfig
from outdraft.core.errors import ConfigError
from outdraft.drafting.request_limits import most_draft_rows
from outdraft.kernels.choose import computed_by, has_graphs
from outdraft.kernels.ops import Kernels
from outdraft.loading.memory import (
    DeviceMemory,
    MemoryPlan,
    StepMemory,
    StepShape,
    activation_bytes,
    device_memory,
    draft_prob_bytes,
    graph_bytes,
    num_blocks,
    prompt_score_bytes,
    sampling_bytes,
    state_bytes,
    text_bytes,
)
from outdraft.loading.methods import LoadedDrafter, cache_bytes, device_proposer, kv_cache
from outdraft.loading.models import LoadedModels, check_shared
from outdraft.models.base import LanguageModel
from outdraft.runner.model_runner import ModelRunner
from outdraft.runner.sharded_runner import ShardedRunner
from outdraft.runner.state import DeviceState
from outdraft.verification.verifier import TypicalAcceptance, Verifier


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
    steps = [_step_memory(config, models) for config, models in engines]
    weights: dict[int, int] = {}
    for config, models in engines:
        drafter = drafter_of(config, models)
        for network in (models.target, *([drafter.network] if drafter else [])):
            weights[id(network)] = network.memory_bytes
    number = len(engines)
    shared = max(step.total - step.kept for step in steps)
    plans: list[MemoryPlan] = []
    for (config, models), step in zip(engines, steps, strict=True):
        target, size = models.target, config.cache.block_size
        drafter = drafter_of(config, models)
        block_bytes = cache_bytes(target.shard, size, target.dtype)
        block_bytes += drafter.bytes_per_block(size) if drafter else 0
        count = num_blocks(
            config.cache,
            block_bytes=block_bytes,
            useful_tokens=config.scheduler.max_num_seqs * longest_text(config, target),
            weights=sum(weights.values()) // number,
            buffers=step.kept + shared // number,
            memory=memory.part(number),
        )
        drafter_weights = drafter.network.memory_bytes if drafter else 0
        if drafter is not None and drafter.network is target:
            drafter_weights = 0
        plans.append(
            MemoryPlan(
                target.numbers,
                target.memory_bytes,
                drafter_weights,
                step,
                block_bytes,
                count,
                size,
                None if config.cache.has_size else memory.part(number).default_cache,
            )
        )
    return plans


def drafter_of(config: EngineConfig, models: LoadedModels) -> LoadedDrafter | None:
    """The network that drafts in this configuration; None: no network does."""
    return models.drafter if config.speculation.network else None


def longest_text(config: EngineConfig, target: LanguageModel) -> int:
    """Tokens of the longest prompt and output.

    Raises:
        ConfigError: max_model_len is more than the model has positions for.
    """
    asked, limit = config.max_model_len, target.config.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len {asked:,} is more than the {limit:,} positions that the model knows"
        )
    return asked or limit


def _step_memory(config: EngineConfig, models: LoadedModels) -> StepMemory:
    check_shared(config, models.config)
    _check_context(config, models)
    target, speculation = models.target, config.speculation
    drafter, max_model_len = drafter_of(config, models), longest_text(config, target)
    vocab_size, network = target.config.vocab_size, speculation.network
    _check_num_drafts(speculation, drafter, vocab_size)
    layers = [target.shard]
    if drafter is not None and drafter.layers is not None:
        layers.append(drafter.layers)
    ranks, scheduler, computed = models.ranks, config.scheduler, computed_by(models.kernels)

    def is_compiled(operation: str) -> bool:
        return not computed[operation].startswith("reference.")

    shape = StepShape(
        scheduler,
        max_model_len,
        num_draft_rows=most_draft_rows(
            speculation, -(-scheduler.max_num_seqs // ranks.target.size)
        ),
        num_sampled=speculation.max_drafts if network is not None and network.samples else 0,
        dtype=target.dtype,
        device=models.device,
        tree=network.tree if network is not None else None,
        drafter_rows=drafter.block_rows if drafter is not None else 0,
        noise_is_compiled=is_compiled("gumbel"),
        penalties_are_compiled=is_compiled("penalize"),
        num_ranks=ranks.target.size,
        has_network=network is not None,
    )
    states = 0
    if drafter is not None and drafter.state_window:
        window = drafter.state_window
        hidden_size, size = target.config.hidden_size, drafter.feature_size
        states = state_bytes(shape, hidden_size, drafter.num_taps, size, window)
        size = config.cache.block_size
        spare = drafter.spare_blocks(size) * drafter.bytes_per_block(size)
        states += scheduler.max_num_seqs * spare
    most = scheduler.max_num_seqs, shape.num_rows, max_model_len
    attention = max(
        models.kernels.attention.temporary_bytes(
            AttentionSizes(*most, one.num_heads, shape, target.dtype)
        )
        for one in layers
        for shape in set(one.cache_shapes)
    )
    return StepMemory(
        texts=text_bytes(shape),
        activations=activation_bytes(shape, layers),
        attention=attention,
        sampling=sampling_bytes(shape, vocab_size),
        prompt_scores=prompt_score_bytes(shape, vocab_size),
        draft_probs=draft_prob_bytes(shape, vocab_size),
        states=states,
        graphs=graph_bytes(shape, layers, vocab_size) if has_graphs(models.kernels) else 0,
    )


def _check_context(config: EngineConfig, models: LoadedModels) -> None:
    """Engines that share weights may differ in max_model_len, unless the frequencies of the rotary
    embedding depend on it."""
    is_same = config.max_model_len == models.config.max_model_len
    if models.target.config.depends_on_context and not is_same:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the models were loaded for "
            f"{models.config.max_model_len}, on which their rotary embedding depends"
        )


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


def build_runner(config: EngineConfig, models: LoadedModels, memory: MemoryPlan) -> ModelRunner:
    """Build the runner of an engine's steps on one rank; it takes the memory of the plan."""
    target, device, kernels = models.target, models.device, models.kernels
    drafter, max_model_len = drafter_of(config, models), longest_text(config, target)
    state = DeviceState(config.scheduler.max_num_seqs, max_model_len, device, kernels)
    cache = kv_cache(target.shard, memory, target.dtype, target.device)
    proposer = None
    if drafter is not None:
        proposer = device_proposer(config, drafter, kernels, memory, target, cache)
    parts = target, cache, state, _verifier(kernels, config.speculation), proposer
    if models.ranks.target.size > 1:
        return ShardedRunner(*parts, ranks=models.ranks)
    return ModelRunner(*parts)


def _verifier(kernels: Kernels, config: SpeculationConfig) -> Verifier:
    bounds = TypicalAcceptance(config.posterior_threshold, config.posterior_alpha)
    return Verifier(kernels, config.rejection_sample_method, bounds)
