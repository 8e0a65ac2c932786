"""The quantisation of a checkpoint's weights, as config.json describes it."""

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.config_json import COUNT, OBJECT, check_supported, checked

_KEY = "config.json: quantization_config"
_WHERE = f"{_KEY}: "
_GROUPS = Annotated[dict[str, dict[str, Any]], Meta(description="an object of objects")]
_NAMES = Annotated[tuple[str, ...], Meta(description="a list of names")]
_SIZES = Annotated[tuple[COUNT, COUNT], Meta(description="two positive sizes")]
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
        found = [
            (_generality(target), scheme)
            for targets, scheme in self.schemes
            for target in targets
            if _matches(module, target)
        ]
        return min(found, key=itemgetter(0))[1] if found else None


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
    method: Any = values.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(values)
    if method == "gguf":  # the file's tensors say how they are stored
        return Quantization(method=method, schemes=())
    methods = "compressed-tensors", *_METHODS, "gguf"
    check_supported(method, methods, f"{_WHERE}quant_method {method!r}")
    return Quantization(method=method, schemes=((("re:.*",), _METHODS[method](values)),))


def check_unquantised(path: Path, quantization: Quantization | None) -> None:
    """Raise ConfigError if random weights would not be as those of the checkpoint are."""
    if quantization is not None:
        raise ConfigError(
            f"load_format 'dummy' makes plain weights, but those of {path} are quantised "
            f"({quantization.method})"
        )


def log_purpose(quantization: Quantization) -> None:
    """Log the quantised activations and caches of a checkpoint, which stay as wide here."""
    made_for = [scheme.activations for _, scheme in quantization.schemes if scheme.activations]
    if made_for:
        _logger.info(_WEIGHT_ONLY, made_for[0])
    if quantization.kv_cache:
        _logger.info("the checkpoint was made for a quantised cache: keys and values stay as wide")


def _compressed_tensors(values: Mapping[str, Any]) -> Quantization:
    for key in ("sparsity_config", "transform_config"):
        content = values.get(key)
        if content and content.get("format") != "dense" and content.get("config_groups") != {}:
            raise ConfigError(f"{_WHERE}{key} is not supported")
    if not values.get("config_groups"):
        raise ConfigError(f"{_WHERE}config_groups is missing")
    schemes = [
        (tuple(map(str, group.get("targets", ()))), _compressed_scheme(group, values.get("format")))
        for group in checked("config_groups", values["config_groups"], _GROUPS, _WHERE).values()
    ]
    return Quantization(
        method="compressed-tensors",
        schemes=tuple(schemes),
        ignored=checked("ignore", values.get("ignore") or (), _NAMES, _WHERE),
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
    weights = checked("weights", group.get("weights"), OBJECT, _WHERE)
    kind, bits = str(weights.get("type", "int")), weights.get("num_bits", 8)
    storage = _COMPRESSED.get((str(stored_as), kind))
    allowed = (4, 8) if storage is Storage.PACKED else (8,)
    if storage is None or bits not in allowed:
        formats = ", ".join(sorted({name for name, _ in _COMPRESSED}))
        raise ConfigError(
            f"{_WHERE}format {stored_as!r} with {kind} weights of {bits} bits is not supported; "
            f"supported: {formats}, with int weights of 8 bits (pack-quantized: 4 too) or float "
            "weights of 8 bits"
        )
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    if strategy not in ("tensor", "channel", "group", "block"):
        raise ConfigError(f"{_WHERE}strategy {strategy!r} of weights is not supported")
    block = weights.get("block_structure") if strategy == "block" else None
    if isinstance(block, str):  # as older releases wrote it: 128x128
        block = [int(size) for size in block.split("x")]
    group_inputs, activations = None, group.get("input_activations")
    if strategy == "group":
        group_inputs = checked("group_size", weights.get("group_size"), COUNT, _WHERE)
    return WeightScheme(
        storage=storage,
        bits=bits,
        group_inputs=group_inputs,
        has_zero=not weights.get("symmetric", True),
        block=_block("block_structure", block),
        activations=activations
        and f"{activations.get('num_bits', 8)}-bit {activations.get('type', 'int')} activations",
    )


def _gptq(values: Mapping[str, Any]) -> WeightScheme:
    _check_dynamic(values, "GPTQ")
    stored_as = values.get("checkpoint_format") or values.get("format") or "gptq"
    stored_as = "marlin" if values.get("is_marlin_format") else stored_as
    what = f"{_WHERE}GPTQ's checkpoint_format {stored_as!r}"
    check_supported(stored_as, ("gptq", "gptq_v2"), what)
    return WeightScheme(
        storage=Storage.GPTQ,
        bits=_bits(values, "GPTQ", (4, 8)),
        group_inputs=_group_or_all(values, "group_size"),
        has_zero=True,
        adds_one=stored_as == "gptq",
    )


def _awq(values: Mapping[str, Any]) -> WeightScheme:
    _check_dynamic(values, "AWQ")
    names = ("version", "checkpoint_format", "format")  # AutoAWQ's, and GPTQModel's
    version = str(next((values[name] for name in names if values.get(name)), "gemm")).lower()
    check_supported(version, ["gemm"], f"{_WHERE}AWQ's version {version!r}")
    return WeightScheme(
        storage=Storage.AWQ,
        bits=_bits(values, "AWQ", (4,)),
        group_inputs=_group_or_all(values, "group_size", "q_group_size"),
        has_zero=True,
    )


def _check_dynamic(values: Mapping[str, Any], name: str) -> None:
    """ "-:" stands before modules that stay plain, as their tensors show too."""
    dynamic = values.get("dynamic") or {}
    if not isinstance(dynamic, Mapping) or not all(str(key).startswith("-:") for key in dynamic):
        raise ConfigError(
            f"{_WHERE}dynamic (settings of single modules) is not supported for {name}"
        )


def _fp8(values: Mapping[str, Any]) -> WeightScheme:
    kind = str(values.get("fmt") or "e4m3")
    check_supported(kind, ["e4m3"], f"{_WHERE}FP8's fmt {kind!r}")
    return WeightScheme(
        storage=Storage.FP8,
        bits=8,
        block=_block("weight_block_size", values.get("weight_block_size")),
        activations="8-bit float activations",
    )


def _mxfp4(_: Mapping[str, Any]) -> WeightScheme:
    return WeightScheme(storage=Storage.MXFP4, bits=4, group_inputs=32)


_METHODS: dict[str, Callable[[Mapping[str, Any]], WeightScheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _generality(target: str) -> int:
    """Order targets: a name says more than a pattern, and that more than a class."""
    return 1 if target.startswith("re:") else 0 if "." in target else 2


def _matches(module: str, target: str) -> bool:
    """Match as compressed-tensors: all of a name, the start of a pattern, or the module's class."""
    if target.startswith("re:"):
        try:
            return re.match(target.removeprefix("re:"), module) is not None
        except re.error as error:
            raise ConfigError(f"{_WHERE}{target!r} is no pattern: {error}") from error
    return target in (module, "Embedding" if module.endswith("embed_tokens") else "Linear")


def _bits(values: Mapping[str, Any], name: str, allowed: tuple[int, ...]) -> int:
    bits = values.get("bits", values.get("w_bit"))
    check_supported(bits, allowed, f"{_WHERE}{name} with {bits!r} bits")
    return bits


def _group_or_all(values: Mapping[str, Any], *keys: str) -> int | None:
    """-1 stands for all inputs."""
    key = next((key for key in keys if values.get(key) is not None), keys[0])
    return None if values.get(key) == -1 else checked(key, values.get(key), COUNT, _WHERE)


def _block(key: str, value: object) -> tuple[int, int] | None:
    return None if value is None else checked(key, value, _SIZES, _WHERE)
