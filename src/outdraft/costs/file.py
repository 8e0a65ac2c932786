"""Keeps measured tables of costs on disk, one file for each way to run a model on a machine.

A file holds the key that it was measured for, and is used for no other. Its name is a digest of the
key. Networks that draft are measured apart from the target: a file has all of them, each under the
name of its method and a digest of its own key.
"""

import contextlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch

from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import OWN_SOURCES, DraftNetworkConfig
from outdraft.control.costs import CostTable
from outdraft.core.errors import ConfigError
from outdraft.loading.machine import installed_version, processor
from outdraft.loading.models import LoadedModels
from outdraft.models.checkpoints.gguf_file import open_gguf

FORMAT, MOST_FILES = 9, 128
MODEL_FILES = (".json", ".safetensors")
Key = dict[str, Any]
_logger = logging.getLogger(__name__)


class CostFile:
    """A table on disk; any error with it costs a log line and a fresh measurement."""

    def __init__(self, folder: Path, key: Key) -> None:
        self.path = folder / f"costs-{digest(key)}.json"
        self._key = key

    def read(self) -> CostTable | None:
        """Read the table; None: there is none, or it cannot be used."""
        try:
            content: Any = json.loads(self.path.read_text("utf-8"))
            if content["key"] != json.loads(json.dumps(self._key)):
                raise ConfigError("it was measured for something else")
            return CostTable.from_json(json.dumps(content["table"]))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ConfigError, KeyError, TypeError, ValueError) as error:
            _logger.warning(
                "costs are measured again, since %s cannot be used: %r", self.path, error
            )
            return None

    def write(self, table: CostTable) -> None:
        """Replace the file at once; readers see the old one or the new one. The files that were
        written last stay."""
        content = {"key": self._key, "table": json.loads(table.to_json())}
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            temporary.write_text(json.dumps(content, indent=2) + "\n", "utf-8")
            temporary.replace(self.path)
            files = self.path.parent.glob("costs-*.json")
            for file in sorted(files, key=lambda file: file.stat().st_mtime_ns)[:-MOST_FILES]:
                file.unlink(missing_ok=True)
        except OSError as error:
            _logger.warning("measured costs are not kept: %s", error)

    def forget(self) -> None:
        """Delete the file, which has long been wrong: the next engine measures again."""
        _logger.warning(
            "passes have long taken more than 1.5 times as long as was measured, or less than two "
            "thirds of it: the next start measures again (%s)",
            self.path,
        )
        with contextlib.suppress(OSError):
            self.path.unlink()


def default_folder() -> Path:
    """The user's cache folder; relative to the current one if the user has no home."""
    try:
        return Path.home() / ".cache" / "outdraft"
    except RuntimeError:
        return Path(".cache") / "outdraft"


def digest(key: Mapping[str, Any]) -> str:
    """Names a key: 16 hexadecimal digits."""
    text = json.dumps(key, sort_keys=True)
    return blake2b(text.encode(), digest_size=8).hexdigest()


def target_key(config: EngineConfig, models: LoadedModels, max_model_len: int) -> Key:
    """Everything that the costs of the target and the host depend on."""
    device = models.device
    return {
        "format": FORMAT,
        "outdraft": installed_version("outdraft"),
        "model": identity(models.path),
        "load_format": config.load_format,
        "model_impl": config.model_impl,
        "numbers": models.target.numbers,
        "kernels": models.kernels.name,
        "activation_dtype": config.activation_dtype,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "ranks": models.ranks.target.size,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "block_size": config.cache.block_size,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "max_num_batched_tokens": config.scheduler.max_num_batched_tokens,
        "max_model_len": max_model_len,
    }


def drafter_key(network: DraftNetworkConfig) -> Key:
    """Everything that the costs of a network depend on, beside the key of the target."""
    if network.source in OWN_SOURCES:
        return {"settings": repr(network)}
    path = Path(network.model)
    settings = replace(network, model="-")
    return {"model": identity(path) if path.exists() else network.model, "settings": repr(settings)}


def identity(path: Path) -> list[tuple[str, int, int]]:
    """Names, bytes and times of change (ns) of a checkpoint's files: cheap, and enough."""
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.suffix in MODEL_FILES)
    else:
        files = open_gguf(path).files
    stats = [(file.name, file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
