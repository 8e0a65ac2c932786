"""Loads the weights and the tokenizer that a configuration names, and builds their runner."""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import BLOCK_SOURCES, OWN_SOURCES, DraftNetworkConfig
from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ONE_RANK, Ranks
from outdraft.kernels.choose import AUTO, automatic_dtype, check_option, choose_kernels, has_library
from outdraft.kernels.ops import Kernels
from outdraft.kv.cache import KVCache
from outdraft.loading.methods import LoadedDrafter, device_proposer, load_drafter, naming
from outdraft.models.base import LanguageModel
from outdraft.models.checkpoints.config_json import default_sampling, read_config, read_json
from outdraft.models.checkpoints.files import resolve_model_path
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.quantization import read_quantization
from outdraft.models.choose import check_shards, checkpoint_dtype, load_language_model
from outdraft.models.drafters.config import DFlashConfig, EagleConfig, drafter_method
from outdraft.models.shape import DRAFT_RANKS, TARGET_RANKS
from outdraft.runner.model_runner import ModelRunner
from outdraft.runner.sharded_runner import ShardedRunner
from outdraft.runner.state import DeviceState
from outdraft.text.tokenizer import load_tokenizer
from outdraft.verification.verifier import Verifier

if TYPE_CHECKING:
    from outdraft.ranks.processes import RankProcesses

NO_LIBRARY = "no compiled library for this machine: the readable reference computes, slowly"
_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedModels:
    """Weights and tokenizer; engines whose configurations name the same models can share them.

    Attributes:
        ranks: over which target and drafter are spread.
        processes: the other ranks, if this process is rank 0 of several.
    """

    config: EngineConfig
    target: LanguageModel
    drafter: LoadedDrafter | None
    tokenizer: Tokenizer | None
    path: Path
    device: torch.device
    kernels: Kernels
    ranks: Ranks
    processes: "RankProcesses | None" = None

    @property
    def longest_text(self) -> int:
        """Most tokens of a prompt and its output.

        Raises:
            ConfigError: max_model_len is more than the model has positions for.
        """
        asked, limit = self.config.max_model_len, self.target.config.max_model_len
        if asked is not None and asked > limit:
            raise ConfigError(
                f"max_model_len {asked:,} is more than the {limit:,} positions that the model knows"
            )
        return asked or limit

    def as_used_by(self, config: EngineConfig) -> "LoadedModels":
        """The models as an engine of this configuration uses them; perhaps it uses no drafter.

        Raises:
            ConfigError: it asks for other models than those that were loaded.
        """
        _check_shared(config, self.config)
        # Engines that share weights may differ in max_model_len, unless the frequencies of the
        # rotary embedding depend on it.
        asked, loaded = config.max_model_len, self.config.max_model_len
        if self.target.config.depends_on_context and asked != loaded:
            raise ConfigError(
                f"max_model_len is {asked}, but the models were loaded for {loaded}, on which "
                "their rotary embedding depends"
            )
        return replace(
            self, config=config, drafter=self.drafter if config.speculation.network else None
        )


def load_models(
    config: EngineConfig, ranks: Ranks = ONE_RANK, device: torch.device | None = None
) -> LoadedModels:
    """Load the networks that the configuration names; of each the part of this rank.

    Args:
        ranks: all ranks, which call this together.
        device: of this rank; None: the first one of the kind that the configuration names.

    Raises:
        ConfigError: a model is missing, unknown or damaged, or cannot be divided over its ranks, or
            the drafter shares too few tokens.
        RanksError: another rank ended.
    """
    check_option(config.kernels)  # before anything is downloaded
    if not has_library():
        _logger.warning(NO_LIBRARY)
    device = device or choose_device(config.device)
    path = find_files(config)
    _check_activations(config, path)
    dtype = choose_dtype(config.dtype, checkpoint_dtype(path), device, config.kernels)
    kernels = choose_kernels(
        config.kernels,
        device,
        dtype,
        has_graphs=not config.enforce_eager,
        activation_dtype=config.activation_dtype,
    )
    with naming(path), stage(f"loaded the weights of {path}"):
        target = load_language_model(
            path,
            dtype,
            device,
            kernels,
            implementation=config.model_impl,
            max_model_len=config.max_model_len,
            quantization=WeightFormat(config.quantization) if config.quantization else None,
            group=ranks.target,
            has_random_weights=config.load_format == "dummy",
        )
    drafter = None
    if config.speculation.network is not None:
        with stage("loaded the drafter"):
            drafter = load_drafter(config, path, target, ranks.draft)
    with stage("loaded the tokenizer"):
        tokenizer = load_tokenizer(tokenizer_path(config, path))
    if config.tokenizer and tokenizer is None:
        raise ConfigError(f"tokenizer {config.tokenizer!r} holds no tokenizer.json")
    return LoadedModels(config, target, drafter, tokenizer, path, device, kernels, ranks)


def find_files(config: EngineConfig) -> Path:
    """The target's directory. Finds everything else that is missing, before weights are read."""
    is_dummy = config.load_format == "dummy"
    path = resolve_model_path(config.model, config.revision, with_weights=not is_dummy)
    default_sampling(config, path)
    tokenizer_path(config, path)
    network = config.speculation.network
    if network is None or network.source is DraftSource.SELF:
        return path
    if is_dummy:
        raise ConfigError(f"load_format 'dummy' leaves {network.source} nothing to draft from")
    if network.source not in OWN_SOURCES:
        drafter_path = resolve_model_path(network.model)
        method = drafter_method(drafter_path) if network.source is DraftSource.MODEL else None
        if method is not None:
            raise ConfigError(
                f"{drafter_path} holds {method}, which is no draft model: speculative_config must "
                f'name it as the method, {{"method": "{method}", "model": ...}}'
            )
    return path


def _check_activations(config: EngineConfig, path: Path) -> None:
    """Raise ConfigError if int8 is configured, but the target has no weights of 4 bits."""
    has_few_bits = is_gguf(path) or (config.quantization or "").startswith("int4")
    if config.activation_dtype != "int8" or has_few_bits:
        return
    stored = read_quantization(read_config(path))
    if stored is None or not any(scheme.bits == 4 for _, scheme in stored.schemes):
        raise ConfigError(
            "activation_dtype int8 is for GGUF files and weights of 4 bits, and those of "
            f"{path} are neither: give auto or float"
        )


def check_division(config: EngineConfig) -> None:
    """Raise ConfigError if the ranks that the configuration asks for cannot have equal parts of the
    target, or of the drafter's layers. Reads config.json only."""
    path = resolve_model_path(config.model, config.revision, with_weights=False)
    check_shards(path, config.parallel.tensor_parallel_size, TARGET_RANKS, config.model_impl)
    network, draft_size = config.speculation.network, config.draft_tensor_parallel_size
    if network is None or draft_size == 1:
        return
    if network.source not in OWN_SOURCES:
        path = resolve_model_path(network.model, with_weights=False)
    if network.source in (DraftSource.EAGLE, DraftSource.EAGLE3, *BLOCK_SOURCES):
        kind = DFlashConfig if network.source in BLOCK_SOURCES else EagleConfig
        kind.from_mapping(read_json(path / "config.json")).layer.shard(draft_size, DRAFT_RANKS)
    elif network.source in (DraftSource.MODEL, DraftSource.MTP):
        check_shards(path, draft_size, DRAFT_RANKS)


def tokenizer_path(config: EngineConfig, model_path: Path) -> Path:
    """The directory of the tokenizer: the model's own, unless the configuration names another."""
    if not config.tokenizer:
        return model_path
    return resolve_model_path(config.tokenizer, with_weights=False)


def with_drafter(models: LoadedModels, config: EngineConfig) -> LoadedModels:
    """Load another configuration's drafter for the same target.

    Raises:
        ConfigError: the drafter is missing or does not fit, or the target is another one.
    """
    if models.processes is not None:
        raise ConfigError("engines that share a target need tensor_parallel_size=1")
    _check_shared(replace(config, speculation=models.config.speculation), models.config)
    drafter = load_drafter(config, models.path, models.target, models.ranks.draft)
    return replace(models, config=config, drafter=drafter)


def _check_shared(config: EngineConfig, loaded: EngineConfig) -> None:
    """Raise ConfigError if the configuration asks for other models than those that were loaded."""
    names = ("model", "tokenizer", "revision", "load_format", "dtype", "device", "kernels")
    for name in (*names, "model_impl", "quantization", "parallel"):
        if getattr(config, name) != getattr(loaded, name):
            raise ConfigError(
                f"{name} is {getattr(config, name)!r}, but the models were loaded with "
                f"{getattr(loaded, name)!r}"
            )
    network, other = config.speculation.network, loaded.speculation.network
    if network is None:
        return
    if other is None or _weights_of(other) != _weights_of(network):
        name = f" {network.model!r}" if network.model else ""
        raise ConfigError(f"{network.source}{name} was not loaded")
    # EAGLE's mask state is always loaded; a draft model's mask token only if configured.
    is_parallel = network.parallel_drafting and network.source == DraftSource.MODEL
    if is_parallel and not other.parallel_drafting:
        raise ConfigError(f"draft_model {network.model!r} was loaded without parallel_drafting")


def _weights_of(network: DraftNetworkConfig) -> tuple[object, ...]:
    """The settings in which configurations of one loaded drafter agree."""
    return network.model, network.source, network.quantization, network.kv_budget


def build_runner(models: LoadedModels, num_blocks: int) -> ModelRunner:
    """Build the runner of an engine's steps on one rank; it takes the memory of `num_blocks` blocks
    and of the texts."""
    config, target, kernels = models.config, models.target, models.kernels
    state = DeviceState(config.scheduler.max_num_seqs, models.longest_text, models.device)
    block_size, place = config.cache.block_size, (target.dtype, target.device)
    cache = KVCache(target.shard.cache_shapes, num_blocks, block_size, *place)
    proposer = None
    if models.drafter is not None:
        proposer = device_proposer(config, models.drafter, target, cache)
    asked = config.speculation
    bounds = asked.posterior_threshold, asked.posterior_alpha
    verifier = Verifier(kernels, asked.rejection_sample_method, *bounds)
    parts = target, cache, state, verifier, proposer
    if models.ranks.target.size > 1:
        return ShardedRunner(*parts, ranks=models.ranks)
    return ModelRunner(*parts)


def choose_device(name: str, rank: int | None = None) -> torch.device:
    """The device of that name; "auto": a GPU if there is one. `rank`: of several ranks, which have
    a GPU each."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no GPU")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or cuda[:N], got {name!r}") from error
    return device if rank is None or device.type == "cpu" else torch.device(device.type, rank)


def choose_dtype(
    name: str, checkpoint_dtype: str, device: torch.device, kernels: str = AUTO
) -> torch.dtype:
    """The dtype of that name; "auto" as EngineConfig documents it."""
    if name != "auto":
        return getattr(torch, name)
    return automatic_dtype(kernels, device, getattr(torch, checkpoint_dtype))


@contextmanager
def stage(name: str) -> Generator[None]:
    """Log the name and the seconds of a stage that ended; nothing of one that failed."""
    started_s = time.perf_counter()
    yield
    _logger.info("%s: %.2f s", name, time.perf_counter() - started_s)
