"""The config.json and the generation_config.json of a checkpoint, and typed values in them."""

import json
import sys
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError, RequestError, did_you_mean
from outdraft.core.sampling import SamplingParams
from outdraft.models.checkpoints.gguf_file import is_gguf
from outdraft.models.checkpoints.gguf_metadata import config_of_gguf, has_own_network

_GENERATION = "generation_config.json"  # has the sampling parameters that the makers recommend
# Its fields that are read, all but one by the names of our parameters.
_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_new_tokens")
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
    file = path / _GENERATION
    return read_json(file) if file.is_file() else {}


def default_sampling(config: EngineConfig, model_path: Path) -> dict[str, Any]:
    """Parameters of a request that leaves them open, by their names in SamplingParams.

    Args:
        model_path: directory of the model's checkpoint.

    Raises:
        ConfigError: the configured file is missing, or a value is out of its range.
    """
    if config.generation_config == "vllm":
        return {}
    is_own = config.generation_config == "auto"
    folder = model_path if is_own else Path(config.generation_config).expanduser()
    path = folder / _GENERATION
    if not is_own and not path.is_file():
        raise ConfigError(
            f"generation_config must be auto, vllm or a directory with {_GENERATION}, got "
            f"{config.generation_config!r}"
        )
    values = read_generation_config(folder)
    found = {name: values[name] for name in _FIELDS if values.get(name) is not None}
    if "max_new_tokens" in found:
        found["max_tokens"] = found.pop("max_new_tokens")
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise ConfigError(f"{path}: {error}; generation_config='vllm' ignores it") from None
    return found


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


def check_known(name: object, known: Collection[str], what: str) -> None:
    """Raise ConfigError, which says `what` and the closest name, unless the name is known."""
    if name not in known:
        raise ConfigError(f"config.json: {what}: {did_you_mean(str(name), known)}")


def check_supported(value: object, supported: Collection[object], what: str) -> None:
    """Raise ConfigError, which says `what` and all that is supported, unless the value is."""
    if value not in supported:
        raise ConfigError(f"{what} is not supported; supported: {', '.join(map(str, supported))}")


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
