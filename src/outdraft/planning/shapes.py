"""Sizes of networks: from a model's name, a config.json or a checkpoint's folder.

Only sizes count here, so networks that the engine does not run can be planned, too: mixtures of
experts, quantised checkpoints. Sliding windows are taken for full attention.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.core.weights import distinct_experts
from outdraft.models.checkpoints.config_json import read_count, read_json

# Bytes of a weight; int4 has a scale of 16 bits for every 128.
BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5 + 2 / 128}
_METHODS = {"fp8": "fp8", "mxfp4": "int4", "awq": "int4", "gptq": "int4"}
EAGLE_VOCABULARY = 32_000  # tokens that EAGLE-3 heads draft, as their papers' and later ones
HOST_SOURCES = ("ngram", "suffix")
HEADS = ("eagle3", "medusa")


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The sizes of one network; numbers of parameters leave out norms and biases.

    Attributes:
        attention_inputs: what queries, keys and values are made of.
        num_experts: a layer; 1 for networks without experts, whose block all rows meet.
        shared_intermediate_size: of the block beside the experts, which every row meets.
        num_dense_layers: those that have one block instead of experts,
        dense_intermediate_size: of this size.
        extra_parameters: read once by the first pass of a draft, such as EAGLE-3's fusion.
        head_parameters: the products after the last layer, always in bf16.
        embedding_parameters: beside the head's; looked up, never read whole.
        dtype: what the layers' weights are kept in, a key of BYTES.
        kv_dtype: likewise the keys and values.
    """

    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    attention_inputs: int
    head_parameters: int
    embedding_parameters: int
    num_experts: int = 1
    experts_per_token: int = 1
    shared_intermediate_size: int = 0
    num_dense_layers: int = 0
    dense_intermediate_size: int = 0
    extra_parameters: int = 0
    dtype: str = "bf16"
    kv_dtype: str = "bf16"

    @property
    def attention_parameters(self) -> int:
        """Parameters of the four products of a layer's attention."""
        kv_inputs = self.attention_inputs * 2 * self.num_kv_heads * self.head_size
        q_inputs = self.attention_inputs * self.num_heads * self.head_size
        return q_inputs + kv_inputs + self.hidden_size * self.num_heads * self.head_size

    @property
    def expert_parameters(self) -> int:
        """Parameters of one MLP: gate, up and down."""
        return 3 * self.hidden_size * self.intermediate_size

    def layer_bytes(self, num_rows: np.ndarray) -> np.ndarray:
        """Bytes of weights that a pass of `num_rows` reads; experts count if a row hits them."""
        mlps = distinct_experts(self.num_experts, self.experts_per_token, num_rows)
        return self._layer_parameters(mlps) * BYTES[self.dtype]

    def _layer_parameters(self, mlps: Any) -> Any:
        """Parameters of all layers, with `mlps` blocks in those that have experts."""
        with_experts = self.num_layers - self.num_dense_layers
        sizes = with_experts * self.shared_intermediate_size
        sizes += self.num_dense_layers * self.dense_intermediate_size
        always = self.num_layers * self.attention_parameters + 3 * self.hidden_size * sizes
        return always + with_experts * mlps * self.expert_parameters

    @property
    def row_operations(self) -> float:
        """Multiplications and additions of one row in the layers' products."""
        return 2.0 * self._layer_parameters(self.experts_per_token)

    @property
    def kv_bytes_per_token(self) -> float:
        values = 2 * self.num_layers * self.num_kv_heads * self.head_size
        return values * BYTES[self.kv_dtype]

    @property
    def weight_bytes(self) -> float:
        """Bytes of memory for all weights."""
        layers = self._layer_parameters(self.num_experts) + self.extra_parameters
        layers *= BYTES[self.dtype]
        return layers + (self.head_parameters + self.embedding_parameters) * BYTES["bf16"]


def find_network(name: str, dtype: str | None = None, kv_dtype: str = "bf16") -> Network:
    """Find a network by a name such as "llama-3.3-70b", a config.json, or a folder that has one.

    Args:
        dtype: of the layers' weights; None: as the config says, else bf16.

    Raises:
        ConfigError: an unknown name, or a config that lacks a size.
    """
    for one in (dtype, kv_dtype):
        if one is not None and one not in BYTES:
            raise ConfigError(f"unknown dtype {one!r}: {did_you_mean(one, BYTES)}")
    label, raw = _find_config(name)
    network = _network(label, raw)
    return replace(network, dtype=dtype or _dtype(raw), kv_dtype=kv_dtype)


def find_drafter(
    name: str, target: Network, dtype: str | None = None
) -> tuple[str, Network | None]:
    """The method, and the network that drafts; None for sources of the host, which cost nothing.

    name: of a network, or "eagle3", "medusa", "ngram", "suffix".

    The heads without a config have the target's sizes.
    The config.json of an EAGLE-3 head is known by its architecture.

    Raises:
        ConfigError: an unknown name, or a config that lacks a size.
    """
    if name in HOST_SOURCES:
        return name, None
    if name == "eagle3":
        return name, _eagle3(name, target, {}, dtype)
    if name == "medusa":
        return name, _medusa(target)
    label, raw = _find_config(name, HEADS + HOST_SOURCES)
    if "eagle3" in json.dumps(raw).lower():
        return "eagle3", _eagle3(label, target, raw, dtype)
    return "draft_model", find_network(name, dtype, target.kv_dtype)


def _find_config(name: str, more: tuple[str, ...] = ()) -> tuple[str, Mapping[str, Any]]:
    path = Path(name)
    if path.is_dir():
        return path.name, read_json(path / "config.json")
    if path.suffix == ".json":
        return path.parent.name or path.stem, read_json(path)
    text = files("outdraft.planning").joinpath("data/models.json").read_text("utf-8")
    known: dict[str, Mapping[str, Any]] = json.loads(text)
    short = name.split("/")[-1].lower().removeprefix("meta-").removesuffix("-instruct")
    if short not in known:
        raise ConfigError(
            f"{name!r} is no folder, no config.json and no known model: "
            f"{did_you_mean(short, [*known, *more])}"
        )
    return short, known[short]


def _network(label: str, raw: Mapping[str, Any]) -> Network:
    raw = raw.get("text_config") or raw  # of models that read images, too
    hidden_size, num_heads = read_count(raw, "hidden_size"), read_count(raw, "num_attention_heads")
    num_experts = read_count(raw, "num_experts", "num_local_experts", "n_routed_experts", default=1)
    if raw.get("kv_lora_rank"):
        raise ConfigError(f"{label}: attention with compressed keys and values is not planned yet")
    words = read_count(raw, "vocab_size") * hidden_size
    intermediate_size = ("intermediate_size",)
    experts: dict[str, Any] = {}
    if num_experts > 1:
        intermediate_size = ("moe_intermediate_size", *intermediate_size)
        experts = {
            "num_experts": num_experts,
            "experts_per_token": read_count(raw, "num_experts_per_tok"),
            "shared_intermediate_size": _shared_size(raw),
            "num_dense_layers": _num_dense_layers(raw),
            "dense_intermediate_size": read_count(
                raw, "intermediate_size_mlp", "intermediate_size", default=1
            ),
        }
    return Network(
        name=label,
        hidden_size=hidden_size,
        num_layers=read_count(raw, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=read_count(raw, "num_key_value_heads", default=num_heads),
        head_size=read_count(raw, "head_dim", default=hidden_size // num_heads),
        intermediate_size=read_count(raw, *intermediate_size),
        attention_inputs=hidden_size,
        head_parameters=words,
        embedding_parameters=0 if raw.get("tie_word_embeddings") else words,
        **experts,
    )


def _shared_size(raw: Mapping[str, Any]) -> int:
    """The width of what every row meets beside its experts, as the families write it."""
    if size := raw.get("shared_expert_intermediate_size") or raw.get("shared_intermediate_size"):
        return size
    if count := raw.get("n_shared_experts"):
        return count * read_count(raw, "moe_intermediate_size")
    return read_count(raw, "intermediate_size") if "llama4" in raw.get("model_type", "") else 0


def _num_dense_layers(raw: Mapping[str, Any]) -> int:
    """Layers without experts: the first ones, named ones, or all but every n-th."""
    num_layers = read_count(raw, "num_hidden_layers")
    first = raw.get("first_k_dense_replace") or 0
    step = read_count(raw, "decoder_sparse_step", "interleave_moe_layer_step", default=1)
    named = raw.get("mlp_only_layers") or ()
    return sum(
        layer < first or layer in named or (layer + 1) % step != 0 for layer in range(num_layers)
    )


def _dtype(raw: Mapping[str, Any]) -> str:
    quantization = raw.get("quantization_config")
    if not quantization:
        return "bf16"
    method = quantization.get("quant_method")
    if method in ("awq", "gptq") and quantization.get("bits") == 8:
        return "int8"
    if method not in _METHODS:
        raise ConfigError(f"config.json: say what {method!r} keeps: {', '.join(BYTES)}")
    return _METHODS[method]


def _eagle3(label: str, target: Network, raw: Mapping[str, Any], dtype: str | None) -> Network:
    """One layer after a fusion of three of the target's states, with a head of its own."""
    raw = {**raw, **(raw.get("transformer_layer_config") or {})}
    sizes = {
        "hidden_size": target.hidden_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "intermediate_size": target.intermediate_size * target.experts_per_token,
    }
    if "num_attention_heads" not in raw:
        sizes["head_dim"] = target.head_size
    given = {key: raw[key] for key in (*sizes, "head_dim") if raw.get(key) is not None}
    words = read_count(raw, "draft_vocab_size", default=EAGLE_VOCABULARY)
    head = _network(label, {**sizes, **given, "num_hidden_layers": 1, "vocab_size": words})
    return replace(
        head,
        attention_inputs=2 * head.hidden_size,
        embedding_parameters=0,
        extra_parameters=3 * target.hidden_size * head.hidden_size,
        dtype=dtype or "bf16",
        kv_dtype=target.kv_dtype,
    )


def _medusa(target: Network) -> Network:
    """One head: a product of the state with itself, and one with the vocabulary."""
    words = target.head_parameters + target.hidden_size**2
    return replace(
        target,
        name="medusa",
        num_layers=0,
        head_parameters=words,
        embedding_parameters=0,
        num_dense_layers=0,
    )
