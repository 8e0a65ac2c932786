"""The choice of code for a checkpoint's network: this engine's, or the transformers library's."""

import logging
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALONE, RankGroup
from outdraft.kernels.ops import Kernels
from outdraft.models.base import LanguageModel
from outdraft.models.checkpoints.config_json import read_config
from outdraft.models.decoder.config import ModelConfig, is_known
from outdraft.models.decoder.loader import load_model

AUTO, TRANSFORMERS = "auto", "transformers"
_logger = logging.getLogger(__name__)


def uses_transformers(path: Path, implementation: str = AUTO) -> bool:
    """Is true if the transformers library computes the network.

    Args:
        implementation: "auto": this engine where it has the family, else the library; "outdraft" or
            "transformers": that one.

    Raises:
        ConfigError: no readable config.json.
    """
    if implementation != AUTO:
        return implementation == TRANSFORMERS
    return not is_known(read_config(path))


def checkpoint_dtype(path: Path) -> str:
    """The dtype that the checkpoint was saved in, such as "bfloat16"; "float32" if unknown."""
    raw = read_config(path)
    parts = raw, raw.get("text_config") or {}  # of a family that reads pictures too
    said = (part.get(name) for part in parts for name in ("dtype", "torch_dtype"))
    return str(next((one for one in said if one), "float32"))


def check_shards(path: Path, size: int, flag: str, implementation: str = AUTO) -> None:
    """Raise ConfigError if a network cannot be spread over `size` ranks. Reads config.json only.

    Args:
        flag: the option that asked for the size.
    """
    if not uses_transformers(path, implementation):
        ModelConfig.from_directory(path).shard(size, flag)
        return
    loader = transformers_loader(path)
    loader.check_division(loader.read_config(path), size, flag)


def transformers_loader(path: Path) -> ModuleType:
    """The module that loads a checkpoint through the library.

    Raises:
        ConfigError: the library is not installed.
    """
    try:
        return import_module("outdraft.models.library.loader")
    except ImportError as error:
        names = read_config(path).get("architectures")
        raise ConfigError(
            f"{path} holds {names}, which outdraft runs through the transformers library: pip "
            f"install 'outdraft[transformers]' ({error})"
        ) from error


def load_language_model(
    path: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    kernels: Kernels,
    *,
    implementation: str = AUTO,
    max_model_len: int | None = None,
    quantization: WeightFormat | None = None,
    group: RankGroup = ALONE,
    drafts: bool = False,
    has_random_weights: bool = False,
) -> LanguageModel:
    """The model of a checkpoint directory, ready to run, its weights packed for the device.

    Args:
        implementation: see `uses_transformers`.
        max_model_len: the longest text that it will read, where that is known.
        group: the ranks that it is spread over; this one reads its part of the files.
        drafts: as CausalLM.
        has_random_weights: small ones, to try shapes and memory without a download.

    Raises:
        ConfigError: the config is not supported or cannot be divided over the group, a tensor is
            missing, unknown, damaged or of another shape, or the library is not installed.
    """
    place = path, dtype, device, kernels, max_model_len, quantization, group
    if not uses_transformers(path, implementation):
        return load_model(*place, drafts=drafts, has_random_weights=has_random_weights)
    load_any = transformers_loader(path).load_transformers_model
    model = load_any(*place, drafts=drafts, has_random_weights=has_random_weights)
    _logger.info(
        "%s: the transformers library computes %s, with this engine's attention and products",
        path,
        model.config.architecture,
    )
    return model
