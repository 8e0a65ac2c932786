"""Loads the weights and the tokenizer that a configuration names."""

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
from outdraft.loading.generation_config import default_sampling
from outdraft.loading.methods import LoadedDrafter, load_drafter, load_self
from outdraft.models.base import LanguageModel
from outdraft.models.checkpoints.config_json import read_config, read_json
from outdraft.models.checkpoints.files import resolve_model_path
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.quantization import read_quantization
from outdraft.models.choose import check_shards, checkpoint_dtype, load_language_model
from outdraft.models.drafters.config import DFlashConfig, EagleConfig, drafter_method
from outdraft.models.shape import DRAFT_RANKS, TARGET_RANKS
from outdraft.text.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from outdraft.ranks.hosts import RankHosts
    from outdraft.ranks.processes import RankProcesses
    from outdraft.ranks.ray_hosts import RayHosts

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


def load_models(
    config: EngineConfig, ranks: Ranks = ONE_RANK, device: torch.device | None = None
) -> LoadedModels:
    """Load the networks that the configuration names; of each the part of this rank.

    Args:
        ranks: all ranks, which call this together; this rank loads its parts. None given: starts
            the other ranks that the configuration names.
        device: of this rank; None: the first one of the kind that the configuration names.

    Raises:
        ConfigError: a model is missing, unknown or damaged, or cannot be divided over its ranks, or
            the drafter shares too few tokens.
        RanksError: another rank ended.
    """
    check_option(config.kernels)  # before anything is downloaded
    if config.parallel.has_ranks and ranks is ONE_RANK:
        return _load_on_ranks(config)
    if not has_library():
        _logger.warning(NO_LIBRARY)
    device = device or choose_device(config.device)
    path = _find_files(config)
    _check_activations(config, path)
    dtype = choose_dtype(config.dtype, checkpoint_dtype(path), device, config.kernels)
    has_graphs = not config.enforce_eager
    kernels = choose_kernels(
        config.kernels,
        device,
        dtype,
        has_graphs=has_graphs,
        activation_dtype=config.activation_dtype,
    )
    kept = WeightFormat(config.quantization) if config.quantization else None
    with _naming(path), stage(f"loaded the weights of {path}"):
        target = load_language_model(
            path,
            dtype,
            device,
            kernels,
            implementation=config.model_impl,
            max_model_len=config.max_model_len,
            quantization=kept,
            group=ranks.target,
            has_random_weights=config.load_format == "dummy",
        )
    if config.speculation.network is None:
        drafter = None
    else:
        with stage("loaded the drafter"):
            drafter = _load_network(config, path, target, ranks)
    with stage("loaded the tokenizer"):
        tokenizer = load_tokenizer(tokenizer_path(config, path))
    if config.tokenizer and tokenizer is None:
        raise ConfigError(f"tokenizer {config.tokenizer!r} holds no tokenizer.json")
    return LoadedModels(config, target, drafter, tokenizer, path, device, kernels, ranks)


@contextmanager
def _naming(path: Path) -> Generator[None]:
    """Name the checkpoint in errors of the block, as there may be several.

    Raises:
        ConfigError: as the block did, and the message names the path.
    """
    try:
        yield
    except ConfigError as error:
        if str(path) in str(error):
            raise
        raise ConfigError(f"{path}: {error}") from error


def _find_files(config: EngineConfig) -> Path:
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
        if network.source is DraftSource.MODEL:
            _check_is_model(drafter_path)
    return path


def _check_is_model(path: Path) -> None:
    """Raise ConfigError if a draft model's checkpoint holds a drafter of another method."""
    method = drafter_method(path)
    if method is not None:
        raise ConfigError(
            f"{path} holds {method}, which is no draft model: speculative_config must name it as "
            f'the method, {{"method": "{method}", "model": ...}}'
        )


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


def _load_on_ranks(config: EngineConfig) -> LoadedModels:
    """Load all ranks' parts at the same time; this process becomes rank 0."""
    # Imported here: one rank needs no libraries of several.
    from outdraft.ranks.hosts import LocalHosts
    from outdraft.ranks.processes import RankProcesses

    size, device = config.parallel.tensor_parallel_size, choose_device(config.device, 0)
    on_cluster = config.parallel.distributed_executor_backend == "ray"
    if not on_cluster and device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size must be at most {torch.cuda.device_count()}, the number of "
            f"GPUs, got {size}"
        )
    check_division(config)
    _find_files(config)  # downloads once, not on every rank
    hosts: RankHosts
    if on_cluster:
        hosts = on_ray = _hosts_of_ray(size, device)
        device = on_ray.own_device
    else:
        hosts = LocalHosts(size)
    processes = RankProcesses(config, hosts)
    try:
        models = load_models(config, processes.start(device), device)
        processes.wait_until_loaded()
    except BaseException:
        processes.end()
        raise
    return replace(models, processes=processes)


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
        layers = kind.from_mapping(read_json(path / "config.json")).layer
        layers.shard(draft_size, DRAFT_RANKS)
    elif network.source in (DraftSource.MODEL, DraftSource.MTP):
        check_shards(path, draft_size, DRAFT_RANKS)


def _hosts_of_ray(size: int, device: torch.device) -> "RayHosts":
    try:
        from outdraft.ranks.ray_hosts import RayHosts
    except ImportError:
        raise ConfigError(
            "distributed_executor_backend ray needs Ray: pip install 'outdraft[ray]'"
        ) from None
    return RayHosts(size, device)


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
    check_shared(replace(config, speculation=models.config.speculation), models.config)
    drafter = _load_network(config, models.path, models.target, models.ranks)
    return replace(models, config=config, drafter=drafter)


def _load_network(
    config: EngineConfig, path: Path, target: LanguageModel, ranks: Ranks
) -> LoadedDrafter | None:
    """Load the drafter of the target at `path`; None: no network drafts."""
    network = config.speculation.network
    if network is None:
        return None
    if network.source is DraftSource.SELF:
        return load_self(config, network, path, target)
    with _naming(resolve_model_path(network.model) if network.model else path):
        return load_drafter(network, path, target, ranks.draft)


def check_shared(config: EngineConfig, loaded: EngineConfig) -> None:
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


def choose_device(name: str, rank: int | None = None) -> torch.device:
    """The device of that name; "auto": a GPU if there is one. `rank`: of several ranks, which have
    a GPU each."""
    if rank is not None:
        kind = choose_device(name)
        return torch.device(kind.type, rank) if kind.type == "cuda" else kind
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"device {name!r} was asked for, but torch sees no GPU")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be auto, cpu or cuda[:N], got {name!r}") from error


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
