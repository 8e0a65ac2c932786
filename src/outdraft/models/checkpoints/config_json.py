"""The config.json of a checkpoint, and typed values in it."""

import json
import math
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.gguf_metadata import config_of_gguf, has_own_network


def read_config(path: Path) -> dict[str, Any]:
    """The config.json of a checkpoint directory, or what a GGUF file says in its place.

    Raises:
        ConfigError: there is none, or a GGUF file cannot be read.
    """
    if not is_gguf(path):
        return read_json(path / "config.json")
    if has_own_network(path):
        return config_of_gguf(path)
    try:
        of_library = import_module("outdraft.models.library.gguf_config")
    except ImportError as error:
        raise ConfigError(
            f"{path} is of an architecture that outdraft runs through the transformers library: "
            f"pip install 'outdraft[gguf,transformers]' ({error})"
        ) from error
    return of_library.mapped_config(path)


def read_generation_config(path: Path) -> dict[str, Any]:
    """The generation_config.json of a checkpoint directory; empty if there is none."""
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        ConfigError: there is no such file, or it holds something else.
    """
    try:
        content: object = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object")
    return content  # pyright: ignore[reportUnknownVariableType]  # keys of a JSON object are str


def read_count(raw: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The positive whole number under the first of these keys that is there.

    Raises:
        ConfigError: it is missing and there is no default, or it is none.
    """
    key = next((key for key in keys if raw.get(key) is not None), None)
    if key is None:
        if default is None:
            raise ConfigError(f"config.json: {keys[0]} is missing")
        return default
    value = raw[key]
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json: {key} must be a positive whole number, got {value!r}")
    return value


def read_positive(raw: Mapping[str, Any], key: str, default: float) -> float:
    """The number above 0 under this key; the default where it is missing or null.

    Raises:
        ConfigError: it is none.
    """
    value = raw.get(key)
    if value is None:
        return default
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise ConfigError(f"config.json: {key} must be a number above 0, got {value!r:.80}")
    return float(value)


def read_object(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under this key, empty where that is missing. Raises ConfigError if it is none."""
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"config.json: {key} must be an object, got {value!r:.80}")
    return value  # pyright: ignore[reportUnknownVariableType]  # keys of a JSON object are str


def read_token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One id, a list of ids, or nothing.

    Raises:
        ConfigError: it is something else.
    """
    value = raw.get(key)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise ConfigError(f"{key} must be a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(ids))
