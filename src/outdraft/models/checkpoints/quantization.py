"""The quantisation of a checkpoint's weights, as config.json describes it."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from outdraft.core.errors import ConfigError

_KEY = "config.json: quantization_config"
_WEIGHT_ONLY = "the checkpoint was made for %s: only its weights are quantised here"
_logger = logging.getLogger(__name__)


class Storage(StrEnum):
    """The published formats."""

    PACKED = "compressed-tensors pack-quantized"
    INTEGERS = "compressed-tensors integers"
    FLOATS = "compressed-tensors float8"
    GPTQ = "GPTQ"
    AWQ = "AWQ"
    FP8 = "FP8"
    MXFP4 = "MXFP4"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightScheme:
    """The format in which the weights of some modules are stored.

    Attributes:
        group_inputs: inputs that share a scale; None: all of an output, or of the weight.
        has_zero: whether groups have zero points.
        block: outputs and inputs of a block with one scale.
        adds_one: GPTQ: whether 1 is to be added to stored zero points.
        activations: what it was made for besides, such as "8-bit int activations".
    """

    storage: Storage
    bits: int
    group_inputs: int | None = None
    has_zero: bool = False
    block: tuple[int, int] | None = None
    adds_one: bool = False
    activations: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """The schemes of a checkpoint.

    Attributes:
        method: as config.json names it.
        schemes: with the modules that they are for: names, patterns after "re:", or classes.
        ignored: modules of no scheme, named in the same way.
        kv_cache: whether it was made for a quantised cache too.
    """

    method: str
    schemes: tuple[tuple[tuple[str, ...], WeightScheme], ...]
    ignored: tuple[str, ...] = ()
    kv_cache: bool = False

    def scheme_of(self, module: str) -> WeightScheme | None:
        """The scheme of a module, such as model.layers.0.mlp.up_proj; None: its weight is plain."""
        if any(_matches(module, target) for target in self.ignored):
            return None
        # A name says more than a pattern, and that more than a class.
        for kind in (_is_name, _is_pattern, _is_class):
            for targets, scheme in self.schemes:
                if any(kind(target) and _matches(module, target) for target in targets):
                    return scheme
        return None

    @property
    def activations(self) -> str | None:
        """The format that the activations were meant to have."""
        return next((scheme.activations for _, scheme in self.schemes if scheme.activations), None)


def read_quantization(raw: Mapping[str, Any]) -> Quantization | None:
    """The schemes in the content of config.json; None: the weights are plain.

    Raises:
        ConfigError: the method, or one of its settings, is not supported.
    """
    values = raw.get("quantization_config") or raw.get("compression_config")
    if not values:
        return None
    if not isinstance(values, Mapping):
        raise ConfigError(f"{_KEY} must be an object, got {values!r:.80}")
    method = values.get("quant_method")
    if method not in _METHODS:
        raise ConfigError(
            f"{_KEY}: quant_method {method!r} is not supported; supported: {', '.join(_METHODS)}"
        )
    return _METHODS[method](values)


def check_unquantised(path: Path, quantization: Quantization | None) -> None:
    """Raise ConfigError if random weights would not be as those of the checkpoint are."""
    if quantization is not None:
        raise ConfigError(
            f"load_format 'dummy' makes plain weights, but those of {path} are quantised "
            f"({quantization.method})"
        )


def log_purpose(quantization: Quantization) -> None:
    """Log the quantised activations and caches of a checkpoint, which stay as wide here."""
    if quantization.activations:
        _logger.info(_WEIGHT_ONLY, quantization.activations)
    if quantization.kv_cache:
        _logger.info("the checkpoint was made for a quantised cache: keys and values stay as wide")


def _compressed_tensors(values: Mapping[str, Any]) -> Quantization:
    for key in ("sparsity_config", "transform_config"):
        content = values.get(key)
        if content and content.get("format") != "dense" and content.get("config_groups") != {}:
            raise ConfigError(f"{_KEY}: {key} is not supported")
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"{_KEY}: config_groups is missing")
    schemes = [
        (tuple(map(str, group.get("targets", ()))), _compressed_scheme(group, values.get("format")))
        for group in _objects("config_groups", list(groups.values()))
    ]
    return Quantization(
        method="compressed-tensors",
        schemes=tuple(schemes),
        ignored=_names(values, "ignore"),
        kv_cache=values.get("kv_cache_scheme") is not None,
    )


_COMPRESSED = {
    ("pack-quantized", "int"): Storage.PACKED,
    ("int-quantized", "int"): Storage.INTEGERS,
    ("naive-quantized", "int"): Storage.INTEGERS,
    ("float-quantized", "float"): Storage.FLOATS,
    ("naive-quantized", "float"): Storage.FLOATS,
}


def _compressed_scheme(group: Mapping[str, Any], common_format: object) -> WeightScheme:
    stored_as = group.get("format") or common_format
    (weights,) = _objects("weights", [group.get("weights")])
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits", 8)
    storage = _COMPRESSED.get((str(stored_as), kind))
    allowed = (4, 8) if storage is Storage.PACKED else (8,)
    if storage is None or bits not in allowed:
        formats = ", ".join(sorted({name for name, _ in _COMPRESSED}))
        raise ConfigError(
            f"{_KEY}: format {stored_as!r} with {kind} weights of {bits} bits is not supported; "
            f"supported: {formats}, with int weights of 8 bits (pack-quantized: 4 too) or float "
            "weights of 8 bits"
        )
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise ConfigError(f"{_KEY}: strategy {strategy!r} of weights is not supported")
    block = weights.get("block_structure") if strategy == "block" else None
    if isinstance(block, str):  # as older releases wrote it: 128x128
        block = [int(size) for size in block.split("x")]
    return WeightScheme(
        storage=storage,
        bits=bits,
        group_inputs=_positive("group_size", weights) if strategy == "group" else None,
        has_zero=not weights.get("symmetric", True),
        block=None if block is None else _block(block),
        activations=_activations(group.get("input_activations")),
    )


def _activations(values: Any) -> str | None:
    if not values:
        return None
    return f"{values.get('num_bits', 8)}-bit {values.get('type', 'int')} activations"


def _gptq(values: Mapping[str, Any]) -> Quantization:
    _check_dynamic(values, "GPTQ")
    stored_as = values.get("checkpoint_format") or values.get("format") or "gptq"
    if stored_as not in ("gptq", "gptq_v2") or values.get("is_marlin_format"):
        raise ConfigError(
            f"{_KEY}: GPTQ's checkpoint_format {stored_as!r} is not supported; supported: "
            "gptq, gptq_v2"
        )
    bits = _bits(values, "GPTQ", (4, 8))
    scheme = WeightScheme(
        storage=Storage.GPTQ,
        bits=bits,
        group_inputs=_group_or_all(values, "group_size"),
        has_zero=True,
        adds_one=stored_as == "gptq",
    )
    return Quantization(method="gptq", schemes=((("re:.*",), scheme),))


def _awq(values: Mapping[str, Any]) -> Quantization:
    _check_dynamic(values, "AWQ")
    names = ("version", "checkpoint_format", "format")  # AutoAWQ's, and GPTQModel's
    version = str(next((values[name] for name in names if values.get(name)), "gemm")).lower()
    if version != "gemm":
        raise ConfigError(f"{_KEY}: AWQ's version {version!r} is not supported; supported: gemm")
    scheme = WeightScheme(
        storage=Storage.AWQ,
        bits=_bits(values, "AWQ", (4,)),
        group_inputs=_group_or_all(values, "group_size", "q_group_size"),
        has_zero=True,
    )
    return Quantization(method="awq", schemes=((("re:.*",), scheme),))


def _check_dynamic(values: Mapping[str, Any], name: str) -> None:
    """ "-:" stands before modules that stay plain, as their tensors show too."""
    dynamic = values.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(str(key).startswith("-:") for key in dynamic):
        raise ConfigError(
            f"{_KEY}: dynamic (settings of single modules) is not supported for {name}"
        )


def _fp8(values: Mapping[str, Any]) -> Quantization:
    if (kind := str(values.get("fmt") or "e4m3")) != "e4m3":
        raise ConfigError(f"{_KEY}: FP8's fmt {kind!r} is not supported; supported: e4m3")
    block = values.get("weight_block_size")
    scheme = WeightScheme(
        storage=Storage.FP8,
        bits=8,
        block=None if block is None else _block(block),
        activations="8-bit float activations",
    )
    method = str(values["quant_method"])
    return Quantization(method=method, schemes=((("re:.*",), scheme),))


def _mxfp4(values: Mapping[str, Any]) -> Quantization:
    scheme = WeightScheme(storage=Storage.MXFP4, bits=4, group_inputs=32)
    method = str(values["quant_method"])
    return Quantization(method=method, schemes=((("re:.*",), scheme),))


def _gguf(values: Mapping[str, Any]) -> Quantization:
    """The file's tensors say how they are stored."""
    return Quantization(method=str(values["quant_method"]), schemes=())


_METHODS = {
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
    "gguf": _gguf,
}


def _is_name(target: str) -> bool:
    return "." in target and not _is_pattern(target)


def _is_pattern(target: str) -> bool:
    return target.startswith("re:")


def _is_class(target: str) -> bool:
    return not _is_name(target) and not _is_pattern(target)


def _matches(module: str, target: str) -> bool:
    """Match as compressed-tensors: all of a name, the start of a pattern, or the module's class."""
    if _is_pattern(target):
        try:
            return re.match(target.removeprefix("re:"), module) is not None
        except re.error as error:
            raise ConfigError(f"{_KEY}: {target!r} is no pattern: {error}") from error
    return target in (module, "Embedding" if module.endswith("embed_tokens") else "Linear")


def _objects(key: str, values: Sequence[Any]) -> list[Mapping[str, Any]]:
    for value in values:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{_KEY}: {key} must hold objects, got {value!r:.80}")
    return list(values)


def _names(values: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = values.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{_KEY}: {key} must be a list of names, got {names!r:.80}")
    return tuple(names)


def _bits(values: Mapping[str, Any], name: str, allowed: tuple[int, ...]) -> int:
    bits = values.get("bits", values.get("w_bit"))
    if bits not in allowed:
        raise ConfigError(
            f"{_KEY}: {name} with {bits!r} bits is not supported; supported: "
            f"{', '.join(map(str, allowed))}"
        )
    return bits


def _positive(key: str, values: Mapping[str, Any]) -> int:
    value = values.get(key)
    if type(value) is not int or value < 1:
        raise ConfigError(f"{_KEY}: {key} must be a positive whole number, got {value!r}")
    return value


def _group_or_all(values: Mapping[str, Any], *keys: str) -> int | None:
    """-1 stands for all inputs."""
    key = next((key for key in keys if values.get(key) is not None), keys[0])
    return None if values.get(key) == -1 else _positive(key, values)


def _block(value: Any) -> tuple[int, int]:
    sizes = list(value) if isinstance(value, list | tuple) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise ConfigError(f"{_KEY}: a block must have two positive sizes, got {value!r:.80}")
    return sizes[0], sizes[1]
