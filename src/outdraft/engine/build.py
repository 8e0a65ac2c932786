"""From a configuration to an engine that is ready to step."""

from collections.abc import Callable

from outdraft.attention.base import AttentionSizes
from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import AUTO, DraftNetworkConfig, SpeculationConfig
from outdraft.control.controller import Controller
from outdraft.control.fixed import FixedLength
from outdraft.control.policy import LengthPolicy
from outdraft.core.draft import MAX_DRAFTS
from outdraft.core.errors import ConfigError
from outdraft.core.request import Request
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.drafting.host_sources import most_draft_rows
from outdraft.drafting.policy import DrafterLimits, DraftPolicy
from outdraft.engine.cost_table import cost_table
from outdraft.engine.drafters import (
    LoadedDrafter,
    cache_bytes,
    device_proposer,
    host_proposers,
    kv_cache,
)
from outdraft.engine.engine import Engine
from outdraft.engine.inputs import InputProcessor
from outdraft.engine.loading import LoadedModels, check_shared, load_models
from outdraft.engine.memory import (
    MemoryPlan,
    StepMemory,
    StepShape,
    activation_bytes,
    device_memory,
    draft_prob_bytes,
    num_blocks,
    sampling_bytes,
    state_bytes,
    text_bytes,
)
from outdraft.kernels.choose import computed_by
from outdraft.kernels.ops import Kernels
from outdraft.kv.block_pool import BlockPool
from outdraft.models.llama import CausalLM
from outdraft.runner.device_state import DeviceState
from outdraft.runner.model_runner import ModelRunner
from outdraft.scheduling.scheduler import Scheduler
from outdraft.verification.typical import TypicalAcceptance
from outdraft.verification.verifier import Verifier

WARM_UP_TOKENS, WARM_UP_STEPS = 4, 4  # of its prompt; the prompt's, then some with drafts


def build_engine(
    config: EngineConfig, models: LoadedModels | None = None
) -> tuple[Engine, MemoryPlan]:
    """An engine that has all its memory, and the account of it."""
    models = models or load_models(config)
    speculation = config.speculation
    check_shared(config, models.config)
    target, drafter = models.target, models.drafter if speculation.network else None
    _check_context(config, models)
    max_model_len = _max_model_len(config.max_model_len, target)
    _check_num_drafts(speculation, drafter, target.config.vocab_size)
    memory = _plan_memory(config, models, drafter, max_model_len)
    state = DeviceState(config.scheduler.max_num_seqs, max_model_len, models.device, models.kernels)
    proposer = None
    if drafter is not None:
        proposer = device_proposer(config, drafter, models.kernels, memory, models.device)
    scheduler = Scheduler(
        config.scheduler,
        config.cache,
        BlockPool(memory.num_blocks),
        max_model_len,
        state_window=drafter.state_window if drafter is not None else 0,
        drafter_reads_ahead=drafter is not None and drafter.reads_ahead,
    )
    inputs = InputProcessor(
        models.tokenizer,
        vocab_size=target.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=target.config.eos_token_ids,
        seed=config.seed,
    )
    cache = kv_cache(target.config, memory, target.dtype, target.device)
    verifier = _verifier(models.kernels, speculation)
    runner = ModelRunner(target, cache, state, verifier, proposer)
    policy = DraftPolicy(
        speculation,
        host_proposers(speculation.sources, models.kernels),
        _drafter_limits(speculation.network, target, drafter, proposer, scheduler.lag_tokens),
        _control(config, models, runner),
        config.scheduler.max_num_seqs,
    )
    return Engine(inputs, scheduler, policy, runner), memory


def warm_up(engine: Engine) -> None:
    """What the first requests would otherwise wait for: pages to touch, kernels to make ready.

    Runs a greedy and a sampled request for a few steps. Nothing is learned from them. The engine
    must be idle.
    """
    control, engine.drafting.control = engine.drafting.control, FixedLength(MAX_DRAFTS)
    size = min(WARM_UP_TOKENS, engine.inputs.max_model_len - 1)
    prompt = [token_id % engine.inputs.vocab_size for token_id in range(size)]
    for temperature in (0.0, 1.0):
        params = SamplingParams(
            temperature=temperature, max_tokens=None, ignore_eos=True, detokenize=False
        )
        engine.add_request("warm-up", prompt, params)
        for _ in range(WARM_UP_STEPS):
            engine.step()
        engine.abort("warm-up")
    engine.drafting.control = control


def _max_model_len(asked: int | None, target: CausalLM) -> int:
    limit = target.config.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len {asked:,} is more than the {limit:,} positions that the model knows"
        )
    return asked or limit


def _check_context(config: EngineConfig, models: LoadedModels) -> None:
    """Engines that share weights may differ in max_model_len, unless the frequencies of the rotary
    embedding depend on it."""
    is_same = config.max_model_len == models.config.max_model_len
    if models.target.config.rope.depends_on_context and not is_same:
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the models were loaded for "
            f"{models.config.max_model_len}, on which their rotary embedding depends"
        )


def _verifier(kernels: Kernels, config: SpeculationConfig) -> Verifier:
    bounds: TypicalAcceptance | None = None
    if not config.is_lossless:
        bounds = TypicalAcceptance(config.posterior_threshold, config.posterior_alpha)
    return Verifier(kernels, config.rejection_sample_method, bounds)


def _check_num_drafts(
    config: SpeculationConfig, drafter: LoadedDrafter | None, vocab_size: int
) -> None:
    """Heads draft so far and no further. Beside other sources their chains are cut instead."""
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
        raise ConfigError(
            f"{network.source} {network.model!r} has {most} heads, so it drafts no further than "
            f"{most} tokens ahead: lower num_speculative_tokens or the depth of the tree"
        )


def _drafter_limits(
    config: DraftNetworkConfig | None,
    target: CausalLM,
    drafter: LoadedDrafter | None,
    proposer: DeviceProposer | None,
    lag_tokens: Callable[[Request], int],
) -> DrafterLimits | None:
    if config is None or drafter is None or proposer is None:
        return None
    longest = drafter.layers.max_model_len if drafter.layers else target.config.max_model_len
    return DrafterLimits(
        min(config.max_model_len or longest, longest),
        proposer.drafting,
        max_drafts=proposer.max_drafts,
        lag_tokens=lag_tokens,
    )


def _control(config: EngineConfig, models: LoadedModels, runner: ModelRunner) -> LengthPolicy:
    """What decides lengths; nobody may draft more than the policy allows."""
    if config.speculation.control == "fixed" or not config.speculation.sources:
        return FixedLength(MAX_DRAFTS)
    return Controller(cost_table(config, models, runner), config.speculation.max_drafts)


def _plan_memory(
    config: EngineConfig, models: LoadedModels, drafter: LoadedDrafter | None, max_model_len: int
) -> MemoryPlan:
    """Before anything but the weights is allocated: what is free then is what there is."""
    target, size = models.target, config.cache.block_size
    block_bytes = cache_bytes(target.config, size, target.dtype)
    if drafter is not None:
        block_bytes += drafter.bytes_per_block(size)
    step = _step_memory(config, models, drafter, max_model_len)
    drafter_weights = drafter.network.memory_bytes if drafter is not None else 0
    count = num_blocks(
        config.cache,
        block_bytes=block_bytes,
        useful_tokens=config.scheduler.max_num_seqs * max_model_len,
        weights=target.memory_bytes + drafter_weights,
        buffers=step.total,
        memory=device_memory(models.device),
    )
    return MemoryPlan(
        target.numbers, target.memory_bytes, drafter_weights, step, block_bytes, count, size
    )


def _step_memory(
    config: EngineConfig, models: LoadedModels, drafter: LoadedDrafter | None, max_model_len: int
) -> StepMemory:
    target, speculation = models.target, config.speculation
    vocab_size, network = target.config.vocab_size, speculation.network
    layers = [target.config]
    if drafter is not None and drafter.layers is not None:
        layers.append(drafter.layers)
    shape = StepShape(
        config.scheduler,
        max_model_len,
        num_draft_rows=most_draft_rows(speculation, config.scheduler.max_num_seqs),
        samples_drafts=network is not None and network.samples,
        dtype=target.dtype,
        device=models.device,
        tree=network.tree if network is not None else None,
        noise_is_compiled=computed_by(models.kernels)["gumbel"].startswith("native."),
    )
    states = 0
    if drafter is not None and drafter.state_window:
        window = drafter.state_window
        hidden_size, size = target.config.hidden_size, drafter.feature_size
        states = state_bytes(shape, hidden_size, drafter.num_taps, size, window)
    most = config.scheduler.max_num_seqs, shape.num_rows, max_model_len
    attention = max(
        models.kernels.attention.temporary_bytes(
            AttentionSizes(*most, one.num_heads, one.num_kv_heads, one.head_size, target.dtype)
        )
        for one in layers
    )
    return StepMemory(
        texts=text_bytes(shape),
        activations=activation_bytes(shape, layers),
        attention=attention,
        sampling=sampling_bytes(shape, vocab_size),
        draft_probs=draft_prob_bytes(shape, vocab_size),
        states=states,
    )
