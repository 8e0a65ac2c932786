"""Checks that configuration values have in common: each error names the option and its value."""

import math

from outdraft.core.errors import ConfigError


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


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless `value` is one of `allowed`."""
    if value not in allowed:
        raise ConfigError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


def _check_bounds(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # also for NaN
        bound = f"at least {low}" if high == math.inf else f"between {low} and {high}"
        raise ConfigError(f"{name} must be {bound}, got {value}")
