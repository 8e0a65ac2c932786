"""Any decoder-only model of the transformers library, as a target or as a draft model.

Its own code computes the network. The engine gives it flat rows with their positions, and computes
attention over the paged cache and all products: no padding, no masks, no cache of the library.

Dimension key: T rows, R rows that need logits, D hidden, V vocabulary, K tapped layers.
"""

import copy
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outdraft.attention.base import AttentionForm, AttentionMetadata, LayerCache
from outdraft.core.errors import ConfigError
from outdraft.distributed.group import RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.ops import Kernels
from outdraft.kernels.products import EmbeddingTable
from outdraft.models.library.experts import routed_weights
from outdraft.models.library.operations import computed_by, leaves_threads, one_torch_thread, paged
from outdraft.models.library.products import FlatLinear, table_of
from outdraft.models.modules import is_one_tensor, memory_bytes, numbers_of
from outdraft.models.shape import ModelShape


class TransformersModel(nn.Module):
    """A `LanguageModel` of any other family. All products are packed.

    Attributes:
        config, shard: the shape of this rank's part, with the whole vocabulary.
    """

    fused = None

    def __init__(
        self,
        model: PreTrainedModel,
        shape: ModelShape,
        attention: Mapping[nn.Module, AttentionForm],
        kernels: Kernels,
        group: RankGroup,
        mask: Tensor | None = None,
    ) -> None:
        """
        Args:
            model: its products are packed.
            shape: of this rank's part.
            attention: of each layer in order, by the module that attends.
            mask: to give to the library, so that it makes none.
        """
        super().__init__()
        self.config = self.shard = shape
        self.kernels, self.group = kernels, group
        self.dtype, self.device = model.dtype, model.device
        self.vocabulary = VocabularyShard(group, shape.vocab_size)
        self._base, self._head = getattr(model, _base_name(model)), _head_of(model)
        self._attention, self._mask = attention, mask
        self._layers = _layers_of(self._base, list(attention))
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        assert isinstance(embedding, nn.Embedding)
        assert isinstance(head, FlatLinear)
        self.lm_head, self._embedding = head.linear, embedding
        text_config = model.config.get_text_config()
        self.routed = routed_weights(model, getattr(text_config, "num_experts_per_tok", None))
        self._leaves_threads = leaves_threads(kernels, model)
        # Llama 4 counts the tokens before a row, and does not read its position.
        self._counts_rows = bool(getattr(text_config, "attn_temperature_tuning", False))

    def forward(
        self, token_ids_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata
    ) -> Tensor:
        return self.forward_tapped(token_ids_T, caches, metadata, ())[0]

    def forward_tapped(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int],
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The hidden states that the family's head reads, and the residual streams of the taps."""
        layers = {
            module: (cache, form)
            for (module, form), cache in zip(self._attention.items(), caches, strict=True)
        }
        attention = paged(self.kernels.attention, layers, metadata)
        positions_T, past = metadata.positions_T, None
        if self._counts_rows:
            past = _TokensBefore(positions_T)
        with (
            one_torch_thread(self._leaves_threads),
            computed_by(attention),
            _tapped(self._layers, taps) as found,
        ):
            out = self._base(
                input_ids=token_ids_T[None],
                position_ids=positions_T[None],
                attention_mask=self._mask,
                past_key_values=past,
                use_cache=False,
            )
        hidden_TD = out.last_hidden_state[0]
        tapped_TKD = hidden_TD.new_empty(len(hidden_TD), 0, hidden_TD.shape[1])
        if taps:
            tapped_TKD = torch.stack([found[tap] for tap in taps], dim=1)
        hidden_RD = hidden_TD if wanted_R is None else hidden_TD.index_select(0, wanted_R)
        return hidden_RD, tapped_TKD

    def logits(self, hidden_RD: Tensor) -> Tensor:
        logits_RV = self._head(inputs_embeds=hidden_RD[None]).logits[0]
        logits_RV = logits_RV.to(torch.promote_types(logits_RV.dtype, torch.float32))
        if self.group.size == 1:
            return logits_RV
        # A cap has made numbers of what a rank pads its logits with.
        return self.vocabulary.padded(logits_RV[:, : self.vocabulary.num_own])

    def checked_best_tokens(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        logits_RV = self.logits(hidden_RD)
        if self.group.size > 1:
            return self.vocabulary.best_tokens(logits_RV)
        best_R = logits_RV.argmax(dim=-1)
        return best_R, logits_RV.gather(1, best_R[:, None])[:, 0].isfinite()

    @property
    def rotary(self) -> nn.Module | None:
        """The rotary embedding of all layers; None: each has its own, or there is none."""
        return getattr(self._base, "rotary_emb", None)

    @property
    def embed_tokens(self) -> EmbeddingTable:
        """A view: every rank has the whole table, and drafters read their rank's part of it."""
        table, first = table_of(self._embedding), self.vocabulary.first
        if self.group.size == 1:
            return table
        end = first + self.vocabulary.num_own
        if isinstance(table.source, Tensor):
            return EmbeddingTable.of(table.source[first:end])
        return EmbeddingTable.of(table(torch.arange(first, end)))

    @property
    def weight_bytes(self) -> int:
        table = table_of(self._embedding)
        return self.memory_bytes - (0 if is_one_tensor(table, self.lm_head) else table.nbytes)

    @property
    def memory_bytes(self) -> int:
        return memory_bytes(self)

    @property
    def numbers(self) -> str:
        return numbers_of(self, self.dtype)


@contextmanager
def _tapped(layers: Sequence[nn.Module], taps: Sequence[int]) -> Generator[dict[int, Tensor]]:
    """The residual streams of a pass inside, [T, D] by their taps: as they enter the layers of
    these numbers, and as one leaves the last layer."""
    found: dict[int, Tensor] = {}

    def entering(tap: int) -> Callable[..., None]:
        def keep(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[tap] = _stream(layer, args[0] if args else kwargs["hidden_states"])

        return keep

    def leaving(layer: nn.Module, _: tuple[Any, ...], out: Any) -> None:
        found[len(layers)] = _stream(layer, out[0] if isinstance(out, tuple) else out)

    hooks = [
        layers[tap].register_forward_pre_hook(entering(tap), with_kwargs=True)
        for tap in taps
        if tap < len(layers)
    ]
    if len(layers) in taps:
        hooks.append(layers[-1].register_forward_hook(leaving))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _stream(layer: nn.Module, states_1TD: Tensor) -> Tensor:
    """[T, D], a copy.

    Raises:
        ConfigError: it is no single stream, as Gemma 3n's is not.
    """
    if states_1TD.dim() != 3 or len(states_1TD) != 1:
        raise ConfigError(
            f"{type(layer).__name__} passes on {len(states_1TD)} streams of states: drafters that "
            "read the target's states cannot draft for it"
        )
    return states_1TD[0].clone()


class _TokensBefore:
    """Stands for a cache, for code that asks how many tokens are before the rows."""

    def __init__(self, positions_T: Tensor) -> None:
        self._before_T = positions_T - torch.arange(len(positions_T), device=positions_T.device)

    def get_seq_length(self, layer: int = 0) -> Tensor:
        """[T]: added to the numbers of the rows, their positions."""
        return self._before_T

    def update(self, k_1GTC: Tensor, v_1GTE: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Attention writes the cache."""
        return k_1GTC, v_1GTE


class _States:
    """The output of a network without its head: hidden states, and nothing else."""

    def __init__(self, last_hidden_state: Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getitem__(self, index: int) -> Tensor:
        assert index == 0
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        return None


class _PassedOn(nn.Module):
    """Stands for the network before a head."""

    @property
    def decoder(self) -> nn.Module:
        """OPT asks the inner one of its two networks."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _States:
        return _States(inputs_embeds)


def _base_name(model: PreTrainedModel) -> str:
    """The model's name for its network without the head."""
    names = [name for name, part in model.named_children() if isinstance(part, PreTrainedModel)]
    if len(names) != 1:
        raise ConfigError(f"{type(model).__name__} has {len(names)} networks, not one, and a head")
    return names[0]


def _head_of(model: PreTrainedModel) -> nn.Module:
    """The model's own head: what it makes of hidden states, scales and caps of logits included."""
    head = copy.copy(model)
    head.__dict__["_modules"] = dict(model.named_children()) | {_base_name(model): _PassedOn()}
    return head


def _layers_of(base: nn.Module, attention: Sequence[nn.Module]) -> list[nn.Module]:
    """The layers that hold these modules, one each."""
    for part in base.modules():
        if isinstance(part, nn.ModuleList) and len(part) == len(attention):
            held = zip(part, attention, strict=True)
            if all(any(inner is one for inner in layer.modules()) for layer, one in held):
                return list(part)
    raise ConfigError(f"{type(base).__name__} is no stack of layers that attend")
