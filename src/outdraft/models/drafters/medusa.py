"""Medusa-1 heads (Cai et al. 2024, arXiv 2401.10774): each predicts one token further ahead.

All heads read the target's last hidden state h, after the final norm, of the newest row that the
target computed: that of token t_i, while t_{i+1} is the newest token. Head j predicts t_{i+2+j},
whatever the tokens between: residual blocks h + SiLU(W h + b), then a language model head.

Two forms of checkpoint are read: vLLM's (blocks.{j}.layers.{k}, lm_heads.{j}), whose names are used
here, and that of the original repository ({j}.{k}.linear, {j}.{number of layers}).

Dimension key: B requests, J heads, K some of them, R rows, Q of them on this rank, D hidden, V
vocabulary of the target, E tokens that a head knows.
"""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.models.checkpoints.config_json import read_count, read_json, read_positive
from outdraft.models.checkpoints.files import Place, read_tensor, tensor_places, weight_files
from outdraft.models.checkpoints.slots import Slot, fill_slots, own_slots, rows_of
from outdraft.models.drafters.tables import (
    TargetedNetwork,
    TargetTables,
    check_sizes,
    over_vocabulary,
    vocabulary_linear,
)
from outdraft.models.modules import Linear, memory_bytes

_ORIGINAL_FILE = "medusa_lm_head.safetensors"
_PREFIX = "medusa_heads."  # some checkpoints of the converted form have it
_TOKEN_MAP = "token_map"


class MedusaHeads(TargetedNetwork):
    """All heads of a target. Weights are not initialised.

    Attributes:
        state_size: D.
        known: E, tokens of the heads' own language model heads.
        own_heads_by_name: those heads, by the names of their tensors.
        token_map_E: the target's token of each, where these are not all.
    """

    token_map_E: Tensor

    def __init__(
        self, raw: Mapping[str, Any], names: Collection[str], tables: TargetTables
    ) -> None:
        """Read the content of config.json and the names of the tensors. Language model heads are
        spread over the ranks of the tables; the blocks are not.

        Raises:
            ConfigError: a value is missing, wrong, or contradicts the target, or the tokens that a
                head knows cannot be divided over the ranks.
        """
        super().__init__(tables)
        target, kind = tables.target.config, self.kind
        check_sizes(raw, tables.target, hidden_key="hidden_size")
        self.num_heads, self.state_size = _num_heads(raw, names), target.hidden_size
        num_layers = read_count(raw, "medusa_num_layers", "num_hidden_layers", default=1)
        num_known = read_count(raw, "truncated_vocab_size", default=target.vocab_size)
        is_cut = num_known < target.vocab_size
        if is_cut and _TOKEN_MAP not in names:
            raise ConfigError(
                f"config.json: truncated_vocab_size={num_known} needs a tensor {_TOKEN_MAP!r}"
            )
        self.known = VocabularyShard(tables.group, min(num_known, target.vocab_size))
        self._scale = read_positive(raw, "logit_scale", 1.0)
        has_bias = bool(raw.get("medusa_fc_bias", "blocks.0.layers.0.bias" in names))
        size = self.state_size
        self._blocks = [
            [Linear(size, size, bias=has_bias, **kind) for _ in range(num_layers)]
            for _ in range(self.num_heads)
        ]
        self.blocks = nn.ModuleList(nn.ModuleList(block) for block in self._blocks)
        own = [f"lm_heads.{head}.weight" for head in range(self.num_heads)]
        head_names = _shared(own, names) if raw.get("original_lm_head") else own
        own_names = dict.fromkeys(name for name in head_names if name is not None)
        self.own_heads_by_name = {
            name: vocabulary_linear(size, self.known, kind) for name in own_names
        }
        self.own_heads = nn.ModuleList(self.own_heads_by_name.values())
        # The target's head is no part of this module: it is neither counted nor packed here.
        self._lm_heads = [
            (tables.head, tables.vocabulary)
            if name is None
            else (self.own_heads_by_name[name], self.known)
            for name in head_names
        ]
        token_map_E = torch.zeros(num_known if is_cut else 0, dtype=torch.int64)
        self.register_buffer("token_map_E", token_map_E.to(self.device), persistent=False)

    def logits(
        self, hidden_BD: Tensor, heads: range | None = None, shares: RequestShares = ALL_HERE
    ) -> Tensor:
        """[Q, K, V] of `heads`, by default all of them, of the rows that are this rank's; -inf for
        tokens that a head does not know.

        The dtype is float32, or float64 as the target's.
        """
        heads = range(self.num_heads) if heads is None else heads
        states = [self._state(head, hidden_BD) for head in heads]
        states_BKD = torch.stack(states, dim=1) if len(states) > 1 else states[0][:, None]
        lm_heads = [self._lm_heads[head] for head in heads]
        if len({id(lm_head) for lm_head, _ in lm_heads}) == 1:  # one read of its weights for all
            logits_RV = self._logits(*lm_heads[0], states_BKD.flatten(0, 1), shares)
            return logits_RV.unflatten(0, (-1, len(heads)))
        each = [self._logits(*one, states_BKD[:, k], shares) for k, one in enumerate(lm_heads)]
        return torch.stack(each, dim=1)

    def _state(self, head: int, hidden_BD: Tensor) -> Tensor:
        for layer in self._blocks[head]:
            hidden_BD = hidden_BD + F.silu(layer(hidden_BD))
        return hidden_BD

    def _logits(
        self, lm_head: Linear, known: VocabularyShard, states_RD: Tensor, shares: RequestShares
    ) -> Tensor:
        """[Q, V]; `known`: the tokens of the head."""
        logits_QE = self.wide(shares.turn(lm_head(states_RD), known.num_tokens))
        if self._scale != 1.0:
            logits_QE = logits_QE * self._scale
        vocab_size = self.tables.vocabulary.num_tokens
        if known.num_tokens == vocab_size:
            return logits_QE
        return over_vocabulary(logits_QE, self.token_map_E, vocab_size)

    @property
    def memory_bytes(self) -> int:
        return super().memory_bytes + self.token_map_E.nbytes

    @property
    def weight_bytes(self) -> int:
        """Weights that drafting with all heads reads, the target's head too where it is used."""
        lm_heads = [lm_head for lm_head, _ in self._lm_heads]
        if len({id(lm_head) for lm_head in lm_heads}) == 1:  # one that all share is read once
            lm_heads = lm_heads[:1]
        return memory_bytes(self.blocks) + sum(memory_bytes(lm_head) for lm_head in lm_heads)

    def checkpoint_slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {}
        for head, block in enumerate(self._blocks):
            for layer, linear in enumerate(block):
                slots |= own_slots(linear, f"blocks.{head}.layers.{layer}.")
        for name, linear in self.own_heads_by_name.items():
            slots[name] = rows_of(self.known, linear.weight)
        return slots


def load_medusa(
    path: Path, tables: TargetTables, quantization: WeightFormat | None = None
) -> MedusaHeads:
    """The heads of a checkpoint directory, ready to run; as load_eagle.

    Raises:
        ConfigError: these are no Medusa heads, or not of this target; or a tensor is missing,
            unknown, damaged or of another shape.
    """
    raw = read_json(path / "config.json")
    names = raw.get("architectures") or []
    is_named = raw.get("model_type") == "medusa" or "MedusaModel" in names
    if not is_named and "medusa_num_heads" not in raw:
        raise ConfigError(
            f"{path} holds no Medusa heads: its config.json has neither medusa_num_heads nor "
            f"model_type 'medusa'"
        )
    original = path / _ORIGINAL_FILE
    files = [original] if original.is_file() else weight_files(path)
    places = tensor_places(files, _slot)
    heads = MedusaHeads(raw, places.keys(), tables)
    _load(heads, places)
    heads.pack(quantization)
    return heads.eval()


def _load(heads: MedusaHeads, places: dict[str, Place]) -> None:
    """Copy the tensors; heads that are stored for all tokens are cut to those of the token map."""
    slots, vocab_size = heads.checkpoint_slots(), heads.tables.vocabulary.num_tokens
    token_map, num_known = places.pop(_TOKEN_MAP, None), heads.known.num_tokens
    if token_map is not None and num_known < vocab_size:  # else nothing, as in vLLM
        token_map_E = _checked_map(read_tensor(token_map), num_known, vocab_size)
        heads.token_map_E.copy_(token_map_E)
        for name in places.keys() & heads.own_heads_by_name.keys():
            whole = read_tensor(places[name])
            if whole.shape == (vocab_size, heads.state_size):
                del places[name]
                slot = slots.pop(name)
                slot.to.copy_(whole[token_map_E[slot.indices[0]]])
    fill_slots(slots, places)


def _num_heads(raw: Mapping[str, Any], names: Collection[str]) -> int:
    """The heads that config.json names: published ones often name fewer than were trained."""
    num_heads = read_count(raw, "medusa_num_heads", "num_heads")
    if "medusa_num_heads" not in raw:
        return num_heads
    found = [int(one[1]) for name in names if (one := re.match(r"blocks\.(\d+)\.", name))]
    return max(num_heads, 1 + max(found, default=-1))


def _slot(name: str) -> str:
    """The slot of a tensor, by its name in either form."""
    name = name.removeprefix(_PREFIX)
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2.", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def _shared(own: list[str], names: Collection[str]) -> list[str | None]:
    """The heads that are there; for the others one that all share, in the file or the target's."""
    common = next((name for name in ("lm_head.weight", own[0]) if name in names), None)
    return [name if name in names else common for name in own]


def _checked_map(token_map_E: Tensor, num_known: int, vocab_size: int) -> Tensor:
    """The token of each row of a head that knows only some."""
    is_whole = not token_map_E.is_floating_point() and token_map_E.shape == (num_known,)
    if is_whole and len(token_map_E.unique()) == num_known:
        lowest, highest = token_map_E.aminmax()
        if int(lowest) >= 0 and int(highest) < vocab_size:
            return token_map_E
    raise ConfigError(
        f"tensor {_TOKEN_MAP!r} must hold {num_known} distinct token ids below "
        f"{vocab_size}, got {token_map_E.dtype} of shape {list(token_map_E.shape)}"
    )
