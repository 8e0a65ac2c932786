"""The common part of the config.json files of EAGLE, DFlash and DSpark drafters.

Their authors write the config of a known family with a few keys more, at its level or in an object
of their own; the speculators library puts that config into `transformer_layer_config`, next to its
own keys. A setting that changes what is computed and is not understood is refused by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.config_json import read_count, read_object
from outdraft.models.decoder.config import ModelConfig

SPECULATORS_KIND = "speculators_model_type"
MASK_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    """The shape of a drafter that has layers of its own and reads the target's states.

    Attributes:
        layer: of its own layers; its vocabulary is the target's.
        draft_vocab_size: how many of the target's tokens it can draft.
        target_hidden_size: of the states that it reads.
        own_embedding, own_head: the checkpoint has them; else the target's are read.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    own_embedding: bool = False
    own_head: bool = False


def drafter_options(raw: Mapping[str, Any], *objects: str) -> dict[str, Any]:
    """The drafter's own keys: some write them into one of these objects, some next to it."""
    options: dict[str, Any] = {}
    for name in objects:
        options |= read_object(raw, name)
    return options | {key: value for key, value in raw.items() if value is not None}


def layer_options(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """The keys of the layers."""
    if SPECULATORS_KIND not in raw:
        return raw
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ConfigError("config.json: transformer_layer_config is missing")
    return layer


def check_supported(
    options: Mapping[str, Any], harmless: Mapping[str, Callable[[Any], bool]]
) -> None:
    """Raise ConfigError for a key whose value is not one at which it changes nothing."""
    for key, is_fine in harmless.items():
        if not is_fine(options.get(key)):
            raise ConfigError(f"config.json: {key}={options[key]!r} is not supported")


def read_flag(options: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """The bool under this key. Raises ConfigError if it is neither true nor false."""
    value = options.get(key, default)
    if not isinstance(value, bool):
        raise ConfigError(f"config.json: {key} must be true or false, got {value!r}")
    return value


def read_layers(options: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """The numbers of layers under this key. Raises ConfigError if it holds something else."""
    layers = options.get(key)
    if not isinstance(layers, list) or not layers or not all(type(one) is int for one in layers):
        raise ConfigError(f"config.json: {key} must be a list of layers, got {layers!r}")
    return tuple(layers)


def read_mask_token(raw: Mapping[str, Any], vocab_size: int) -> int | None:
    """The token that a drafter reads in place of tokens not known yet; None: it was not trained to.

    Raises:
        ConfigError: it is no token of the vocabulary.
    """
    values = {**raw, **read_object(raw, "dflash_config")}
    key = next((key for key in MASK_KEYS if values.get(key) is not None), None)
    if key is None:
        return None
    value = values[key]
    if type(value) is not int or not 0 <= value < vocab_size:
        raise ConfigError(
            f"config.json: {key} must be a token id below {vocab_size}, got {value!r}"
        )
    return value


def read_draft_vocab_size(
    options: Mapping[str, Any], vocab_size: int, *, is_whole: bool = False
) -> int:
    """The number of tokens that it can draft; `is_whole`: it must be the whole vocabulary. Raises
    ConfigError if it does not fit."""
    size = read_count(options, "draft_vocab_size", default=vocab_size)
    if size > vocab_size or (is_whole and size != vocab_size):
        raise ConfigError(
            f"config.json: draft_vocab_size {size} does not fit a vocabulary of {vocab_size}"
        )
    return size


def check_taps(taps: Sequence[int], num_target_layers: int) -> None:
    """Raise ConfigError if a target with num_target_layers has no such streams."""
    if not all(0 <= tap <= num_target_layers for tap in taps):
        raise ConfigError(
            f"the drafter reads the target behind layers {list(taps)}, but the target has "
            f"{num_target_layers} layers"
        )
