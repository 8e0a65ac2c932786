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
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.models.checkpoints.config_json import read_count, read_json
from outdraft.models.checkpoints.files import Place, read_tensor, tensor_places, weight_files
from outdraft.models.checkpoints.slots import Slot, rows_of
from outdraft.models.drafters.tables import (
    TargetedNetwork,
    TargetTables,
    check_sizes,
    vocabulary_linear,
)
from outdraft.models.modules import Linear, memory_bytes

_ARCHITECTURE, _MODEL_TYPE = "MLPSpeculatorPreTrainedModel", "mlp_speculator"
_PREFIX = "speculator."
_NORM_EPS = 1e-6

Part = TypeVar("Part", bound=nn.Module)


class ScaleAndShift(nn.Module):
    """The factor of x / rms(x), and the summand, which IBM's code calls a layer norm; not
    initialised."""

    def __init__(self, size: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        empty_S = torch.empty(size, dtype=dtype, device=device)
        self.weight = nn.Parameter(empty_S, requires_grad=False)
        self.bias = nn.Parameter(empty_S.clone(), requires_grad=False)


class MLPSpeculator(TargetedNetwork):
    """All heads of a target. Weights are not initialised.

    Attributes:
        state_size: D.
        inner_dim: width of the embeddings here.
        num_distinct: of each part the number of weights; the last one serves all later heads, which
            share everything but the projection of the first if weights are tied.
    """

    def __init__(self, raw: Mapping[str, Any], tables: TargetTables) -> None:
        """Read the content of config.json. The products with the vocabulary are spread over the
        ranks of the tables.

        Raises:
            ConfigError: another architecture, a value is missing or wrong, or contradicts the
                target.
        """
        super().__init__(tables)
        _check_architecture(raw)
        check_sizes(raw, tables.target, hidden_key="emb_dim")
        self.state_size, vocabulary = read_count(raw, "emb_dim"), read_count(raw, "vocab_size")
        given = {} if raw.get("inner_dim") == 0 else raw
        self.inner_dim = inner = read_count(given, "inner_dim", default=self.state_size)
        self.num_heads = num_heads = read_count(raw, "n_predict")
        is_tied = bool(raw.get("tie_weights", False))
        if is_tied and num_heads == 1:
            raise ConfigError("config.json: tie_weights needs n_predict of at least 2")
        self._scales_input = bool(raw.get("scale_input", False))
        state_weight = 0.5 ** (0.5 / num_heads)
        # The weight of a token's embedding, where the state's is 1.
        self._token_share = math.sqrt((1 - state_weight**2) * (inner / 2)) / state_weight
        self.num_distinct: dict[str, int] = dict.fromkeys(
            ("emb", "ln", "head"), 1 if is_tied else num_heads
        )
        self.num_distinct["proj"] = 2 if is_tied else num_heads
        num, kind = self.num_distinct, self.kind
        self._emb = [
            nn.Embedding.from_pretrained(torch.empty(vocabulary, inner, **kind))
            for _ in range(num["emb"])
        ]
        self._proj = [
            Linear(inner if i else self.state_size, inner, bias=False, **kind)
            for i in range(num["proj"])
        ]
        self._ln = [ScaleAndShift(inner, **kind) for _ in range(num["ln"])]
        self._head = [vocabulary_linear(inner, tables.vocabulary, kind) for _ in range(num["head"])]
        self.emb, self.proj = nn.ModuleList(self._emb), nn.ModuleList(self._proj)
        self.ln, self.head = nn.ModuleList(self._ln), nn.ModuleList(self._head)

    def first_state(self, hidden_BD: Tensor) -> Tensor:
        """[B, D]: what head 0 continues, from the target's last hidden states."""
        if not self._scales_input:
            return hidden_BD
        return self.kernels.scale_to_rms(hidden_BD, math.sqrt(0.5), _NORM_EPS)

    def step(self, head: int, state_RS: Tensor, token_ids_R: Tensor) -> Tensor:
        """[R, S]: the state of a head, from the state before it and the token before its own."""
        z_RS = _of(self._proj, head)(state_RS)
        norm = _of(self._ln, head)
        mixed_RS = torch.add(z_RS, _of(self._emb, head)(token_ids_R), alpha=self._token_share)
        normed_RS = self.kernels.scale_to_rms(mixed_RS, 1.0, _NORM_EPS)
        return F.gelu(normed_RS * norm.weight + norm.bias)

    def logits(self, head: int, state_RS: Tensor, shares: RequestShares = ALL_HERE) -> Tensor:
        """[Q, V] of a head, from its own state, of the rows that are this rank's; float32, or
        float64 as the target's."""
        num_tokens = self.tables.vocabulary.num_tokens
        return self.wide(shares.turn(_of(self._head, head)(state_RS), num_tokens))

    @property
    def weight_bytes(self) -> int:
        """Weights that drafting with all heads reads; of the embeddings it reads a few rows."""
        parts = [_of(part, j) for part in (self._proj, self._head) for j in range(self.num_heads)]
        return sum(map(memory_bytes, parts))

    def checkpoint_slots(self) -> dict[str, Slot]:
        slots = super().checkpoint_slots()
        for i, head in enumerate(self._head):
            slots[f"head.{i}.weight"] = rows_of(self.tables.vocabulary, head.weight)
        return slots


def load_mlp_speculator(
    path: Path, tables: TargetTables, quantization: WeightFormat | None = None
) -> MLPSpeculator:
    """The speculator of a checkpoint directory, ready to run; as load_eagle.

    Raises:
        ConfigError: this is no MLP speculator, or not of this target; or a tensor is missing,
            unknown, damaged or of another shape.
    """
    speculator = MLPSpeculator(read_json(path / "config.json"), tables)
    places = tensor_places(weight_files(path), lambda name: name.removeprefix(_PREFIX))
    _leave_out_copies(places, speculator)
    return speculator.filled(places, quantization)


def _check_architecture(raw: Mapping[str, Any]) -> None:
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


def _of(parts: list[Part], head: int) -> Part:
    """The weights of a head, its own or those that it shares."""
    return parts[min(head, len(parts) - 1)]


def _leave_out_copies(places: dict[str, Place], speculator: MLPSpeculator) -> None:
    """Drop the tensors that tied weights repeat; they must be the same numbers."""
    for slot, place in list(places.items()):
        match = re.fullmatch(r"(emb|proj|ln|head)\.(\d+)\.(\w+)", slot)
        if match is None:
            continue
        part, head, kind = match.groups()
        last = speculator.num_distinct[part] - 1
        shared = places.get(f"{part}.{last}.{kind}")
        if not last < int(head) < speculator.num_heads or shared is None:
            continue
        if not torch.equal(read_tensor(place), read_tensor(shared)):
            raise ConfigError(
                f"tensor {place[1]!r} differs from {shared[1]!r}, but config.json has tie_weights"
            )
        del places[slot]
