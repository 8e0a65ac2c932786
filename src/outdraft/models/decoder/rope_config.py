"""What a checkpoint's config.json says of its rotary embedding.

transformers 5 writes rope_parameters; before, there were rope_theta and rope_scaling.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.models.checkpoints.counts import read_count, read_object, read_positive


class RopeKind(StrEnum):
    """How rotary frequencies are stretched beyond the trained context."""

    PLAIN = "default"
    LINEAR = "linear"
    DYNAMIC = "dynamic"
    LLAMA3 = "llama3"
    LONGROPE = "longrope"
    YARN = "yarn"


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding; each kind reads the fields that its formula has.

    Attributes:
        turned: share of a head's dimensions that turn; the others stay as they are.
        original_max_len: positions of the training before it was stretched.
        context_len: the longest text that is read. The frequencies of dynamic and longrope depend
            on it, and on no text's own length: keys in the cache would not fit otherwise.
        attention_factor: multiplies cos and sin; yarn and longrope only, None: the papers' value.
        truncate: yarn only: its ramp starts and ends at whole dimensions.
        short_factors, long_factors: longrope only: what divides each frequency, with contexts of up
            to original_max_len and with longer ones.
    """

    kind: RopeKind = RopeKind.PLAIN
    theta: float = 10000.0
    factor: float = 1.0
    turned: float = 1.0
    original_max_len: int = 0
    context_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def depends_on_context(self) -> bool:
        """Whether the frequencies are others with another context_len."""
        return self.kind in (RopeKind.DYNAMIC, RopeKind.LONGROPE)

    def num_turned(self, head_size: int) -> int:
        """Dimensions of a head that turn."""
        return int(head_size * self.turned)


_ORIGINAL = "original_max_position_embeddings"
# By their names in config.json: what each kind needs, and what it may have besides.
_KEYS: dict[RopeKind, tuple[tuple[str, ...], tuple[str, ...]]] = {
    RopeKind.LINEAR: (("factor",), ()),
    RopeKind.DYNAMIC: (("factor",), (_ORIGINAL,)),
    RopeKind.LLAMA3: (("factor", "high_freq_factor", "low_freq_factor"), (_ORIGINAL,)),
    RopeKind.LONGROPE: (("long_factor", "short_factor"), ("factor", _ORIGINAL, "attention_factor")),
    RopeKind.YARN: (
        ("factor",),
        (_ORIGINAL, "beta_fast", "beta_slow", "attention_factor", "truncate"),
    ),
}
# Where RopeConfig has other names.
_FIELDS = {
    _ORIGINAL: "original_max_len",
    "short_factor": "short_factors",
    "long_factor": "long_factors",
}


def read_rope(raw: Mapping[str, Any], head_size: int) -> RopeConfig:
    """The rotary embedding of a model whose heads have so many dimensions.

    Raises:
        ConfigError: a value is missing, wrong or unknown.
    """
    values = read_object(raw, "rope_scaling") | read_object(raw, "rope_parameters")
    theta = read_positive(values, "rope_theta", read_positive(raw, "rope_theta", 10000.0))
    values.pop("rope_theta", None)
    old_name = values.pop("type", None)
    name = str(values.pop("rope_type", None) or old_name or RopeKind.PLAIN)
    if name not in set(RopeKind):
        raise ConfigError(
            f"config.json: unknown rope type {name!r}: {did_you_mean(name, RopeKind)}"
        )
    kind = RopeKind(name)
    max_positions = read_count(raw, "max_position_embeddings")
    turned = _turned(values.pop("partial_rotary_factor", raw.get("partial_rotary_factor")))
    fields = {} if kind is RopeKind.PLAIN else _rope_fields(kind, values)
    if kind is RopeKind.LONGROPE and raw.get(_ORIGINAL) is not None:
        fields["original_max_len"] = read_count(raw, _ORIGINAL)
    fields.setdefault("original_max_len", max_positions)
    if kind is RopeKind.LONGROPE:
        fields.setdefault("factor", max_positions / fields["original_max_len"])
    rope = RopeConfig(kind=kind, theta=theta, turned=turned, **fields)
    rope = replace(rope, context_len=_longest_context(rope, max_positions))
    _check_turned(rope, head_size)
    return rope


def _rope_fields(kind: RopeKind, values: Mapping[str, Any]) -> dict[str, Any]:
    """What the kind reads of rope_parameters, under the names of RopeConfig."""
    needed, others = _KEYS[kind]
    for key in values:
        if key not in needed + others:
            raise ConfigError(
                f"config.json: rope type '{kind}' with {key!r} is not supported: "
                f"{did_you_mean(key, needed + others)}"
            )
    given = {key: value for key, value in values.items() if value is not None}
    if missing := [key for key in needed if key not in given]:
        raise ConfigError(f"config.json: rope type '{kind}' needs {', '.join(missing)}")
    return {_FIELDS.get(key, key): _checked(key, given) for key in given}


def _checked(key: str, given: Mapping[str, Any]) -> object:
    """The value of that name, of the type and in the range that it must have."""
    value = given[key]
    if key in ("short_factor", "long_factor"):
        return _factors(key, value)
    if key == _ORIGINAL:
        return read_count(given, key)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if key == "truncate" and not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} must be true or false, got {value!r:.80}")
    if key != "truncate" and not is_number:
        raise ConfigError(f"config.json: {key} must be a number above 0, got {value!r:.80}")
    return value


def _factors(key: str, value: object) -> tuple[float, ...]:
    factors: list[Any] = value if isinstance(value, list) else []
    if not factors or not all(isinstance(one, int | float) and one > 0 for one in factors):
        raise ConfigError(
            f"config.json: {key} must be a list of numbers above 0, got {value!r:.80}"
        )
    return tuple(float(one) for one in factors)


def _turned(value: object) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(
            f"config.json: partial_rotary_factor must be above 0 and at most 1, got {value!r}"
        )
    return float(value)


def _check_turned(rope: RopeConfig, head_size: int) -> None:
    turned = rope.num_turned(head_size)
    least = 4 if rope.kind is RopeKind.DYNAMIC else 2
    if turned < least or turned % 2:
        raise ConfigError(
            f"config.json: partial_rotary_factor {rope.turned:g} turns {turned} of {head_size} "
            f"dimensions: it must be an even number of at least {least}"
        )
    for name, factors in (("short_factor", rope.short_factors), ("long_factor", rope.long_factors)):
        if factors and len(factors) != turned // 2:
            raise ConfigError(
                f"config.json: {name} has {len(factors)} numbers, but {turned // 2} frequencies"
            )


def _longest_context(rope: RopeConfig, max_positions: int) -> int:
    """Checkpoints whose yarn or dynamic scaling was switched on by hand still tell the length
    before it."""
    if rope.kind in (RopeKind.YARN, RopeKind.DYNAMIC):
        return max(max_positions, int(rope.factor * rope.original_max_len))
    return max_positions
