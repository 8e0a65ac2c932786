"""The config.json of a checkpoint, and typed values in it."""

import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.gguf_metadata import config_of_gguf, has_own_network

# Types of values, with what they must be in words.
COUNT = Annotated[int, Meta(ge=1, description="a positive whole number")]
NUMBER = Annotated[float, Meta(gt=0, le=sys.float_info.max, description="a number above 0")]
FLAG = Annotated[bool, Meta(description="true or false")]
LIST = Annotated[list[Any], Meta(description="a list")]
OBJECT = Annotated[dict[str, Any], Meta(description="an object")]
_IDS = Annotated[int | tuple[int, ...] | None, Meta(description="a token id or a list of them")]


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
        of_library = import_module("outdraft.models.library.gguf")
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


def checked(key: str, value: object, kind: Any, where: str = "config.json: ") -> Any:
    """The value under this key, of a type that is annotated as those above.

    Raises:
        ConfigError: it is of another type, or out of its range; `where` begins the message.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError:
        what = kind.__metadata__[0].description
        raise ConfigError(f"{where}{key} must be {what}, got {value!r:.80}") from None


def read_count(raw: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    """The positive whole number under the first of these keys that is there.

    Raises:
        ConfigError: it is missing and there is no default, or it is none.
    """
    key = next((key for key in keys if raw.get(key) is not None), keys[0])
    value = default if raw.get(key) is None else raw[key]
    if value is None:
        raise ConfigError(f"config.json: {key} is missing")
    return checked(key, value, COUNT)


def read_positive(raw: Mapping[str, Any], key: str, default: float) -> float:
    """The number above 0 under this key; the default where it is missing or null.

    Raises:
        ConfigError: it is none.
    """
    return checked(key, default if raw.get(key) is None else raw[key], NUMBER)


def read_object(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The object under this key, empty where that is missing. Raises ConfigError if it is none."""
    return checked(key, raw.get(key) or {}, OBJECT)


def read_token_ids(raw: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """One id, a list of ids, or nothing.

    Raises:
        ConfigError: it is something else.
    """
    ids: Any = checked(key, raw.get(key), _IDS, "")
    return () if ids is None else (ids,) if isinstance(ids, int) else tuple(dict.fromkeys(ids))
