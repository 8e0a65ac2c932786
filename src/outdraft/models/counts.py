"""Counts in a checkpoint's config.json."""

from collections.abc import Mapping
from typing import Any

from outdraft.core.errors import ConfigError


def read_count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """The positive whole number of that name.

    Raises:
        ConfigError: it is missing and there is no default, or it is none.
    """
    value = raw.get(key)
    value = default if value is None else value
    if value is None:
        raise ConfigError(f"config.json: {key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"config.json: {key} must be a positive whole number, got {value!r}")
    return value
