"""Fields of configurations: those that are flags, and checks whose errors name field and value."""

import json
import math
from dataclasses import field
from enum import StrEnum
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from outdraft.core.errors import ConfigError

Choice = TypeVar("Choice", bound=StrEnum)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def flag(*spellings: str, default: Any = None, **settings: Any) -> Any:
    """A field of a dataclass that the command line offers as a flag with settings of its own.

    All of it is metadata: this needs no library of the command line.

    Args:
        spellings: of the flag; none: it is made of the field's name.
        settings: more arguments of typer.Option.
    """
    return field(default=default, metadata={"spellings": spellings, **settings})


def check_fields(config: object) -> None:
    """Check each field of a dataclass against its annotation, without those of parts and texts.

    `Annotated[int, low, high]` and `Annotated[float, low, high]` have bounds, `high` may be left
    out; `Annotated[str, choices]` has a tuple of choices.

    Raises:
        ConfigError: a value is of another type, out of bounds, or not one of the choices.
    """
    for name, kind in get_type_hints(type(config), include_extras=True).items():
        value = getattr(config, name)
        base, *limits = get_args(kind) if get_origin(kind) is Annotated else (kind,)
        if type(None) in get_args(base):
            base = get_args(base)[0]
            if value is None:
                continue
        if base is bool:
            if not isinstance(value, bool):
                raise ConfigError(f"{name} must be true or false, got {value!r}")
        elif get_origin(base) is Literal:
            check_choice(name, value, get_args(base))
        elif limits and base is str:
            check_choice(name, value, *limits)
        elif limits:
            check = check_whole if base is int else check_number
            check(name, value, *limits)


def check_whole(name: str, value: object, low: int, high: float = math.inf) -> None:
    """Raise ConfigError unless `value` is a whole number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(f"{name} must be a whole number, got {value!r}")
    _check_bounds(name, value, low, high)


def check_number(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Raise ConfigError unless `value` is a number from `low` to `high`; NaN is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"{name} must be a number, got {value!r}")
    _check_bounds(name, value, low, high)


def check_path(name: str, value: object) -> None:
    """Raise ConfigError unless `value` may be a directory or a name."""
    if not isinstance(value, str | PathLike) or not str(value):
        raise ConfigError(f"{name} must be a directory or a name, got {value!r:.80}")


def read_text(path: Path, name: str) -> str:
    """The text of a file.

    Raises:
        ConfigError: it cannot be read; `name` is the file's name in the message.
    """
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from None


def json_object(text: str, name: str, what: str = "a JSON object") -> dict[str, Any]:
    """The value of a flag.

    Raises:
        ConfigError: it is none; `what` it must be is said then.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be {what}, got {text}")
    return value


def parse_bytes(text: str) -> int:
    """A number of bytes such as 4096, 256Mi or 1.5G; a trailing B is allowed.

    Raises:
        ConfigError: it is none.
    """
    number = text.strip().lower().removesuffix("b")
    unit = number.lstrip("0123456789.")
    try:
        return int(float(number.removesuffix(unit)) * _UNITS[unit])
    except (KeyError, ValueError):
        raise ConfigError(f"{text!r} is no number of bytes: write 268435456, 256Mi or 1G") from None


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def as_choice(name: str, value: str, kind: type[Choice]) -> Choice:
    """The member of an enumeration that `value` spells.

    Raises:
        ConfigError: none does.
    """
    check_choice(name, value, tuple(kind))
    return kind(value)


def _check_bounds(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also for NaN
        bound = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ConfigError(f"{name} must be {bound}, got {value}")
