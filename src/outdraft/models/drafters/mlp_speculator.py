"""MLP speculators (Wertheimer et al. 2024, arXiv 2404.19124): a short recurrence over tokens.

The first state is the target's last hidden state, after the final norm, of the newest row that
the target computed. Head j adds the embedding of the token before, the newest one for head 0, and
predicts the next token:

    state = GELU(ln_j(proj_j(state) + emb_weight / state_weight * emb_j(token)))
    logits = head_j(state)

The weights are such that the target's state makes up half of what the last head reads. Checkpoints
are those of IBM's accelerators; top_k_tokens_per_head and n_candidates of their configs describe
the trees of another engine and are not used here.

Dimension key: B requests, R rows, Q of them on this rank, D hidden of the target, S state (of the
target's width before head 0, the inner width after it), V vocabulary.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.models.base import LanguageModel
from outdraft.models.checkpoints.config_json import read_count, read_json
from outdraft.models.checkpoints.files import Place, read_tensor, tensor_places, weight_files
from outdraft.models.checkpoints.slots import Slot, fill_slots, own_slots, rows_of
from outdraft.models.decoder.layers import Kind
from outdraft.models.drafters.tables import TargetTables, check_sizes, vocabulary_linear
from outdraft.models.modules import Linear, memory_bytes, pack_linears

_ARCHITECTURE, _MODEL_TYPE = "MLPSpeculatorPreTrainedModel", "mlp_speculator"
_PREFIX = "speculator."
_NORM_EPS = 1e-6

Part = TypeVar("Part", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class MLPSpeculatorConfig:
    """The shape of a speculator.

    Attributes:
        emb_dim: width of the target's hidden states; the embeddings here have inner_dim.
        tie_weights: the heads share everything but the projection of the first.
        scale_input: the target's state is normed first.
    """

    vocab_size: int
    emb_dim: int
    inner_dim: int
    num_heads: int
    tie_weights: bool
    scale_input: bool

    @classmethod
    def from_mapping(cls, raw: Mapping[str, Any], target: LanguageModel) -> "MLPSpeculatorConfig":
        """Read the content of config.json.

        Raises:
            ConfigError: another architecture, a value is missing or wrong, or contradicts the
                target.
        """
        names = raw.get("architectures") or []
        if raw.get("model_type") != _MODEL_TYPE and _ARCHITECTURE not in names:
            raise ConfigError(
                f"config.json is not that of an MLP speculator: it names neither the "
                f"architecture {_ARCHITECTURE} nor model_type {_MODEL_TYPE!r}"
            )
        if (names and names != [_ARCHITECTURE]) or raw.get("method") is not None:
            raise ConfigError(
                f"config.json: a speculator of architectures={names}, method="
                f"{raw.get('method')!r} is not supported; supported: {_ARCHITECTURE}"
            )
        check_sizes(raw, target, hidden_key="emb_dim")
        emb_dim = read_count(raw, "emb_dim")
        inner_dim = emb_dim if raw.get("inner_dim") == 0 else None
        config = cls(
            vocab_size=read_count(raw, "vocab_size"),
            emb_dim=emb_dim,
            inner_dim=inner_dim or read_count(raw, "inner_dim", default=emb_dim),
            num_heads=read_count(raw, "n_predict"),
            tie_weights=bool(raw.get("tie_weights", False)),
            scale_input=bool(raw.get("scale_input", False)),
        )
        if config.tie_weights and config.num_heads == 1:
            raise ConfigError("config.json: tie_weights needs n_predict of at least 2")
        return config

    def num_distinct(self, part: str) -> int:
        """The number of weights of this part; the last one serves all later heads."""
        if not self.tie_weights:
            return self.num_heads
        return 2 if part == "proj" else 1

    @property
    def token_share(self) -> float:
        """The weight of a token's embedding, where the state's is 1."""
        state_weight = 0.5 ** (0.5 / self.num_heads)
        emb_weight = math.sqrt((1 - state_weight**2) * (self.inner_dim / 2))
        return emb_weight / state_weight


class ScaleAndShift(nn.Module):
    """The factor of x / rms(x), and the summand, which IBM's code calls a layer norm; not
    initialised."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        empty_S = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty_S, requires_grad=False)
        self.bias = nn.Parameter(empty_S.clone(), requires_grad=False)


class MLPSpeculator(nn.Module):
    """All heads of a target. Weights are not initialised."""

    def __init__(self, config: MLPSpeculatorConfig, tables: TargetTables) -> None:
        """The products with the vocabulary are spread over the ranks of the tables."""
        super().__init__()
        target = tables.target
        self._kernels, self._tokens = target.kernels, tables.vocabulary
        self.config, self.num_heads = config, config.num_heads
        self.dtype, self.device = target.dtype, target.device
        kind = Kind(dtype=self.dtype, device=self.device)
        inner, vocabulary = config.inner_dim, config.vocab_size
        self._emb = [
            nn.Embedding.from_pretrained(torch.empty(vocabulary, inner, **kind))
            for _ in range(config.num_distinct("emb"))
        ]
        self._proj = [
            Linear(inner if i else config.emb_dim, inner, bias=False, **kind)
            for i in range(config.num_distinct("proj"))
        ]
        self._ln = [ScaleAndShift(inner, **kind) for _ in range(config.num_distinct("ln"))]
        self._head = [
            vocabulary_linear(inner, self._tokens, kind) for _ in range(config.num_distinct("head"))
        ]
        self.emb, self.proj = nn.ModuleList(self._emb), nn.ModuleList(self._proj)
        self.ln, self.head = nn.ModuleList(self._ln), nn.ModuleList(self._head)

    def first_state(self, hidden_BD: Tensor) -> Tensor:
        """[B, D]: what head 0 continues, from the target's last hidden states."""
        if not self.config.scale_input:
            return hidden_BD
        return self._kernels.scale_to_rms(hidden_BD, math.sqrt(0.5), _NORM_EPS)

    def step(self, head: int, state_RS: Tensor, token_ids_R: Tensor) -> Tensor:
        """[R, S]: the state of a head, from the state before it and the token before its own."""
        z_RS = _of(self._proj, head)(state_RS)
        norm = _of(self._ln, head)
        mixed_RS = torch.add(z_RS, _of(self._emb, head)(token_ids_R), alpha=self.config.token_share)
        normed_RS = self._kernels.scale_to_rms(mixed_RS, 1.0, _NORM_EPS)
        return F.gelu(normed_RS * norm.weight + norm.bias)

    def logits(self, head: int, state_RS: Tensor, shares: RequestShares = ALL_HERE) -> Tensor:
        """[Q, V] of a head, from its own state, of the rows that are this rank's; float32, or
        float64 as the target's."""
        logits_QV = shares.turn(_of(self._head, head)(state_RS), self._tokens.num_tokens)
        return logits_QV.to(torch.promote_types(self.dtype, torch.float32))

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights, packed ones included."""
        return memory_bytes(self)

    @property
    def weight_bytes(self) -> int:
        """Weights that drafting with all heads reads; of the embeddings it reads a few rows."""
        parts = [_of(part, j) for part in (self._proj, self._head) for j in range(self.num_heads)]
        return sum(map(memory_bytes, parts))

    def slots(self) -> dict[str, Slot]:
        """The place of each tensor of a checkpoint; only before the weights are packed."""
        slots = own_slots(self)
        for i, head in enumerate(self._head):
            slots[f"head.{i}.weight"] = rows_of(self._tokens, head.weight)
        return slots


def load_mlp_speculator(
    path: Path, tables: TargetTables, quantization: WeightFormat | None = None
) -> MLPSpeculator:
    """The speculator of a checkpoint directory, ready to run; as load_eagle.

    Raises:
        ConfigError: this is no MLP speculator, or not of this target; or a tensor is missing,
            unknown, damaged or of another shape.
    """
    target = tables.target
    config = MLPSpeculatorConfig.from_mapping(read_json(path / "config.json"), target)
    places = tensor_places(weight_files(path), lambda name: name.removeprefix(_PREFIX))
    if config.tie_weights:
        _leave_out_copies(places, config)
    speculator = MLPSpeculator(config, tables)
    fill_slots(speculator.slots(), places)
    pack_linears(speculator, target.kernels, quantization)
    return speculator.eval()


def _of(parts: list[Part], head: int) -> Part:
    """The weights of a head, its own or those that it shares."""
    return parts[min(head, len(parts) - 1)]


def _leave_out_copies(places: dict[str, Place], config: MLPSpeculatorConfig) -> None:
    """Drop the tensors that tied weights repeat; they must be the same numbers."""
    for slot, place in list(places.items()):
        match = re.fullmatch(r"(emb|proj|ln|head)\.(\d+)\.(\w+)", slot)
        if match is None:
            continue
        part, head, kind = match.groups()
        last = config.num_distinct(part) - 1
        shared = places.get(f"{part}.{last}.{kind}")
        if not last < int(head) < config.num_heads or shared is None:
            continue
        if not torch.equal(read_tensor(place), read_tensor(shared)):
            raise ConfigError(
                f"tensor {place[1]!r} differs from {shared[1]!r}, but config.json has tie_weights"
            )
        del places[slot]
