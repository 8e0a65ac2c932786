"""From a configuration to an engine that is ready to step."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from outdraft.attention.base import AttentionBackend
from outdraft.attention.cpu import CPU_DTYPES
from outdraft.attention.reference import ReferenceAttention
from outdraft.attention.select import attention_backend
from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import (
    DraftModelConfig,
    NgramConfig,
    SourceConfig,
    SuffixConfig,
)
from outdraft.core.errors import ConfigError
from outdraft.engine.engine import Engine
from outdraft.engine.inputs import InputProcessor
from outdraft.engine.memory import MemoryPlan, free_bytes, num_blocks
from outdraft.engine.step_memory import (
    StepMemory,
    StepShape,
    activation_bytes,
    draft_prob_bytes,
    sampling_bytes,
    text_bytes,
)
from outdraft.engine.tokenizer import load_tokenizer
from outdraft.kv.block_pool import BlockPool
from outdraft.kv.cache import KVCache
from outdraft.models.config import ModelConfig
from outdraft.models.layers.linear import cpu_multiplies_bfloat16
from outdraft.models.llama import CausalLM
from outdraft.models.loader import load_model, resolve_model_path
from outdraft.runner.device_state import DeviceState
from outdraft.runner.executor import LocalExecutor
from outdraft.runner.model_runner import ModelRunner
from outdraft.scheduling.scheduler import Scheduler
from outdraft.spec.draft_model import DraftModelProposer
from outdraft.spec.draft_policy import DrafterLimits, DraftPolicy, most_draft_rows
from outdraft.spec.ngram import NgramProposer
from outdraft.spec.proposer import HostProposer
from outdraft.spec.rejection_sampler import Verifier
from outdraft.spec.suffix import SuffixProposer

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """Weights and tokenizer; engines whose configurations name the same models can share them."""

    config: EngineConfig
    target: CausalLM
    drafter: CausalLM | None
    tokenizer: Tokenizer | None
    path: Path
    device: torch.device
    attention: AttentionBackend


def load_models(config: EngineConfig) -> LoadedModels:
    """Load what the configuration names.

    Raises:
        ConfigError: a model is missing, unknown or damaged, or the drafter has another vocabulary.
    """
    device = choose_device(config.device)
    attention = attention_backend(config.attention, device)
    path = resolve_model_path(config.model)
    target = _load(path, config.dtype, device, attention)
    if attention.name == "cpu" and target.dtype not in CPU_DTYPES:
        raise ConfigError(
            f"dtype {str(target.dtype).removeprefix('torch.')} needs attention='reference' on a CPU"
        )
    drafter = None
    if (drafting := config.speculation.draft_model) is not None:
        drafter_path = resolve_model_path(drafting.model)
        drafter = _load(drafter_path, config.dtype, device, attention)
        check_vocabularies(path, target, drafter_path, drafter)
    tokenizer_path = resolve_model_path(config.tokenizer) if config.tokenizer else path
    tokenizer = load_tokenizer(tokenizer_path)
    if config.tokenizer and tokenizer is None:
        raise ConfigError(f"tokenizer {config.tokenizer!r} holds no tokenizer.json")
    return LoadedModels(config, target, drafter, tokenizer, path, device, attention)


def build_engine(
    config: EngineConfig, models: LoadedModels | None = None
) -> tuple[Engine, MemoryPlan]:
    """An engine that has all its memory, and the account of it."""
    models = models or load_models(config)
    target, drafter = models.target, models.drafter
    speculation = config.speculation
    _check_shared(config, models.config)
    if speculation.draft_model is None:
        drafter = None
    max_model_len = _max_model_len(config.max_model_len, target)
    memory = _plan_memory(config, models, drafter, max_model_len)
    state = DeviceState(config.scheduler.max_num_seqs, max_model_len, models.device)
    cache = _cache(target, memory, models.device)
    proposer = None
    if drafter is not None and speculation.draft_model is not None:
        proposer = DraftModelProposer(
            drafter,
            _cache(drafter, memory, models.device),
            config.scheduler.max_num_batched_tokens,
            samples=speculation.draft_model.draft_sample_method == "probabilistic",
            shares_noise=speculation.rejection_sample_method == "drafter_invariant",
        )
    runner = ModelRunner(
        target, cache, state, Verifier(speculation.rejection_sample_method), proposer
    )
    scheduler = Scheduler(
        config.scheduler, config.cache, BlockPool(memory.num_blocks), max_model_len
    )
    inputs = InputProcessor(
        models.tokenizer,
        vocab_size=target.config.vocab_size,
        max_model_len=max_model_len,
        eos_token_ids=target.config.eos_token_ids,
        seed=config.seed,
    )
    policy = DraftPolicy(
        speculation,
        _host_proposers(speculation.sources),
        _drafter_limits(speculation.draft_model, target, drafter),
        config.scheduler.max_num_seqs,
    )
    return Engine(inputs, scheduler, policy, LocalExecutor(runner)), memory


def choose_device(name: str) -> torch.device:
    """The device of that name; "auto": a GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no GPU")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or cuda[:N], got {name!r}") from error


def choose_dtype(name: str, checkpoint_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of that name; "auto" as EngineConfig documents it."""
    if name != "auto":
        return getattr(torch, name)
    if device.type == "cuda":
        return getattr(torch, checkpoint_dtype)
    return torch.bfloat16 if cpu_multiplies_bfloat16() else torch.float32


def check_vocabularies(
    target_path: Path, target: CausalLM, drafter_path: Path, drafter: CausalLM
) -> None:
    """Raise ConfigError unless the drafter's ids mean what the target's mean.

    Where one of them has no tokenizer, only the sizes can be compared: then it warns.
    """
    sizes = target.config.vocab_size, drafter.config.vocab_size
    texts = load_tokenizer(target_path), load_tokenizer(drafter_path)
    same = sizes[0] == sizes[1]
    if same and texts[0] is not None and texts[1] is not None:
        same = texts[0].get_vocab() == texts[1].get_vocab()
    elif same:
        without = target_path if texts[0] is None else drafter_path
        _logger.warning(
            "%s has no tokenizer.json: of the vocabularies of target and draft model only the "
            "sizes were compared (%d ids). If the ids of %s mean other tokens, hardly any draft "
            "will be accepted.",
            without,
            sizes[0],
            drafter_path,
        )
    if not same:
        raise ConfigError(
            f"the draft model {drafter_path} has another vocabulary ({sizes[1]:,} ids) than the "
            f"target {target_path} ({sizes[0]:,} ids): choose a drafter with the same tokenizer"
        )


def _check_shared(config: EngineConfig, loaded: EngineConfig) -> None:
    """Raise ConfigError if the configuration asks for other models than those that were loaded."""
    for name in ("model", "tokenizer", "dtype", "device", "attention"):
        if getattr(config, name) != getattr(loaded, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but the models were loaded with "
                f"{getattr(loaded, name)!r}"
            )
    drafter, other = config.speculation.draft_model, loaded.speculation.draft_model
    if drafter is not None and (other is None or other.model != drafter.model):
        raise ConfigError(f"the draft model {drafter.model!r} was not loaded")


def _load(path: Path, dtype: str, device: torch.device, attention: AttentionBackend) -> CausalLM:
    own_dtype = ModelConfig.from_directory(path).torch_dtype or "float32"
    return load_model(path, choose_dtype(dtype, own_dtype, device), device, attention)


def _max_model_len(asked: int | None, target: CausalLM) -> int:
    limit = target.config.max_model_len
    if asked is not None and asked > limit:
        raise ConfigError(
            f"max_model_len {asked:,} is more than the {limit:,} positions that the model knows"
        )
    return asked or limit


def _drafter_limits(
    config: DraftModelConfig | None, target: CausalLM, drafter: CausalLM | None
) -> DrafterLimits | None:
    if config is None or drafter is None:
        return None
    longest = drafter.config.max_model_len
    return DrafterLimits(
        min(config.max_model_len or longest, longest), drafter.weight_bytes / target.weight_bytes
    )


def _cache(model: CausalLM, memory: MemoryPlan, device: torch.device) -> KVCache:
    config = model.config
    return KVCache(
        config.num_layers,
        memory.num_blocks,
        memory.block_size,
        config.num_kv_heads,
        config.head_size,
        model.dtype,
        device,
    )


def _plan_memory(
    config: EngineConfig, models: LoadedModels, drafter: CausalLM | None, max_model_len: int
) -> MemoryPlan:
    """Before anything but the weights is allocated: what is free then is what there is."""
    target, size = models.target, config.cache.block_size
    used = [model for model in (target, drafter) if model is not None]
    block_bytes = sum(
        KVCache.bytes_per_block(
            model.config.num_layers,
            size,
            model.config.num_kv_heads,
            model.config.head_size,
            model.dtype,
        )
        for model in used
    )
    step = _step_memory(config, models, used, max_model_len)
    count = num_blocks(
        config.cache,
        block_bytes=block_bytes,
        useful_tokens=config.scheduler.max_num_seqs * max_model_len,
        buffers=step.total,
        free=free_bytes(models.device),
    )
    drafter_weights = drafter.memory_bytes if drafter is not None else 0
    return MemoryPlan(target.memory_bytes, drafter_weights, step, block_bytes, count, size)


def _step_memory(
    config: EngineConfig, models: LoadedModels, used: Sequence[CausalLM], max_model_len: int
) -> StepMemory:
    """`used`: the target, and the drafter if this engine has one."""
    speculation, vocab_size = config.speculation, models.target.config.vocab_size
    drafting = speculation.draft_model
    shape = StepShape(
        config.scheduler,
        max_model_len,
        num_draft_rows=most_draft_rows(speculation, config.scheduler.max_num_seqs),
        samples_drafts=drafting is not None and drafting.draft_sample_method == "probabilistic",
        dtype=models.target.dtype,
        device=models.device,
    )
    attention = 0
    if isinstance(models.attention, ReferenceAttention):
        attention = max(
            models.attention.temporary_bytes(
                config.scheduler.max_num_seqs,
                shape.num_rows,
                max_model_len,
                model.config.num_heads,
                (model.config.num_kv_heads, model.config.head_size),
                model.dtype,
            )
            for model in used
        )
    return StepMemory(
        texts=text_bytes(shape),
        activations=activation_bytes(shape, [model.config for model in used]),
        attention=attention,
        sampling=sampling_bytes(shape, vocab_size),
        draft_probs=draft_prob_bytes(shape, vocab_size),
    )


def _host_proposers(sources: tuple[SourceConfig, ...]) -> list[HostProposer]:
    proposers: list[HostProposer] = []
    for source in sources:
        if isinstance(source, NgramConfig):
            proposers.append(NgramProposer(source))
        elif isinstance(source, SuffixConfig):
            proposers.append(SuffixProposer(source))
    return proposers
