"""Drafts with a network that reads tokens: a small model, EAGLE or MTP layers.

A language model reads a token; its cache has everything else that it needs. EAGLE (arXiv 2401.15077
and 2503.01840) reads a token together with a state of the text before it. That state is the
target's where the target has read the text, else EAGLE's own.

It reads its own drafts, level after level. Or it drafts all tokens of a chain in one pass (PARD, An
et al. 2025, arXiv 2504.18583): after the newest token it reads mask tokens, one for every draft but
the first, as causal rows at the positions of the drafts. The row of the newest token gives the
first draft, and the row of each mask token gives the next one. So no draft depends on the drafts
before it. The keys and values of the mask tokens have no use later: whatever is accepted, the
network counts as having read the text up to the newest token only. Networks that read states beside
tokens (P-EAGLE, arXiv 2602.01469) have a learned state for the mask tokens, which stands in for the
target's.

Dimension key: B requests that draft, G those of all ranks that share the network, E nodes of the
level above, F nodes of a level, K drafts, V the target's vocabulary, T rows, R rows whose logits
are needed, Q of them on this rank, S state rows, L tokens of a text, D the network's state.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from msgspec import structs
from torch import Tensor
from torch.nn.functional import pad

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.attention.rows import to_device
from outdraft.core.draft import MAX_DRAFTS, DraftSource
from outdraft.core.errors import ConfigError
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.drafting.device.asks import DraftModelAsk, StateWindow, TargetStates
from outdraft.drafting.device.grower import KnownLevels, compiled_grow, frontier_of_all
from outdraft.drafting.device.text_reader import TextReader
from outdraft.drafting.device.translated_model import DraftModel, TranslatedModel
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.graph_sizes import rounded_grown_len
from outdraft.kernels.decoder_ops import FusedPasses
from outdraft.kernels.draft_ops import DraftStart, Frontier, Growth, UnreadTexts
from outdraft.kv.cache import KVCache
from outdraft.models.base import StateNetwork
from outdraft.models.checkpoints.config_json import read_json
from outdraft.models.drafters.config import MASK_KEYS, read_mask_token


def mask_token_id(path: Path, vocab_size: int) -> int:
    """The mask token that the config.json of a checkpoint directory names.

    Raises:
        ConfigError: it names none, or one outside of the vocabulary: the checkpoint was not
            trained to draft in parallel.
    """
    token = read_mask_token(read_json(path / "config.json"), vocab_size)
    if token is None:
        raise ConfigError(
            f"{path} was not trained for parallel drafting: its config.json has none of "
            f"{', '.join(MASK_KEYS)}"
        )
    return token


class DraftNetwork:
    """Reads tokens, and gives the logits after them.

    Attributes:
        network: reads tokens, or tokens and states.
        token_shift: 0: a token's keys are kept at its own cache index. 1: a token is read together
            with the state before it, and its keys are kept at the index of that state. Then nothing
            can be kept for the newest token of a text before the next token is known.
        feature_size: F of `features`; 0: it reads no states.
        taps: residual streams of the target that `features` reads,
        reads_hidden: or it reads the state after the last layer instead.
    """

    def __init__(self, network: DraftModel | StateNetwork) -> None:
        self.network, self.kernels = network, network.kernels
        self.token_shift, self.feature_size, self.taps = 0, 0, ()
        self._on_states, self._model = None, None
        if isinstance(network, StateNetwork):
            self.token_shift, self.feature_size, self.taps = 1, network.feature_size, network.taps
            self._on_states = network
        else:
            self._model = network
        self.reads_hidden = self._on_states is not None and not self.taps

    @property
    def fused(self) -> FusedPasses | None:
        """Whole drafts in one call; None: it has none."""
        return self.network.fused

    def features(self, states: TargetStates) -> Tensor:
        """[T, F]: features of the target's pass that it reads; only if token_shift is 1."""
        assert self._on_states is not None, "a language model reads no states"
        return self._on_states.features(states.hidden_TD, states.tapped_TKD)

    def logits(self, states_RD: Tensor, shares: RequestShares = ALL_HERE) -> Tensor:
        """[Q, V] of float32 at least, of the rows that are this rank's; -inf for tokens that the
        network does not know."""
        if self._on_states is not None:
            return self._on_states.logits(states_RD, shares)
        assert self._model is not None
        if isinstance(self._model, TranslatedModel):
            return self._model.logits(states_RD, shares)
        return shares.turn(self._model.logits(states_RD), self._model.vocabulary.num_tokens)

    def read(
        self,
        token_ids_T: Tensor,
        states_TD: Tensor | None,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """[T, D]: the states after the tokens.

        Args:
            token_ids_T: int64; if token_shift is 1, the tokens after those whose rows the batch
                names.
            states_TD: if token_shift is 1, features for the tokens of a text; for drafts the states
                that `read` returned for their parents.
        """
        if self._on_states is not None:
            assert states_TD is not None
            return self._on_states(token_ids_T, states_TD, caches, metadata)
        assert self._model is not None
        return self._model(token_ids_T, caches, metadata)


class NetworkDrafter:
    """Drafts for texts on the device with a `DraftNetwork`: level by level, or with mask tokens."""

    def __init__(
        self,
        network: DraftNetwork,
        cache: KVCache,
        max_rows: int,
        source: DraftSource,
        window: StateWindow | None = None,
        *,
        mask_token_id: int | None = None,
        mask_state_D: Tensor | None = None,
    ) -> None:
        """
        Args:
            max_rows: of one pass over texts.
            window: of a network whose token_shift is 1.
            mask_token_id: of the network's vocabulary, if it drafts in one pass; None: it reads its
                drafts.
            mask_state_D: what a network whose token_shift is 1 reads beside mask tokens.
        """
        self.network = network
        self.state_window = window.num_tokens if window is not None else 0
        self.taps, self.reads_all_hidden = network.taps, network.reads_hidden
        self._mask, shift = mask_token_id, network.token_shift
        self.max_drafts, self.max_passes = MAX_DRAFTS, MAX_DRAFTS if self._mask is None else 1
        keeps_chain = self._mask is None and shift == 0
        self.source, self.max_kept = source, None if keeps_chain else -shift
        self._reader = TextReader(network, cache, max_rows, window, mask_state_D)
        self.keep, self.unread = self._reader.keep, self._reader.unread

    def draft(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, growth: Growth
    ) -> DraftBatch:
        if self._mask is not None:
            return compiled_grow(self._known_levels(asks, token_ids_SL, growth), growth)
        unread = self.unread(asks, token_ids_SL)
        if (fused := self.network.fused) is not None:
            return fused.draft(unread, growth)
        start = self.start(asks, unread)
        levels = NetworkLevels(self.network, start, growth.num_drafts_G, growth.shares)
        return compiled_grow(levels, growth)

    def _known_levels(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, growth: Growth
    ) -> KnownLevels:
        """Read mask tokens after the texts: the logits of all levels."""
        assert self._mask is not None
        num_levels = [min(ask.num_drafts, growth.shape.depth) for ask in asks]
        masked = [
            structs.replace(ask, masks=(self._mask,) * (number - 1))
            for ask, number in zip(asks, num_levels, strict=True)
        ]
        states_GKD = self._reader.read_masked(masked, token_ids_SL, num_levels)
        logits_RV = self.network.logits(states_GKD.flatten(0, 1), growth.shares)
        return KnownLevels(logits_RV.unflatten(0, (-1, states_GKD.shape[1])))

    def start(self, asks: Sequence[DraftModelAsk], unread: UnreadTexts) -> DraftStart:
        """Read the unread rest of the texts."""
        shift = self.network.token_shift
        contexts = [ask.num_tokens - ask.num_missing - ask.num_skipped - shift for ask in asks]
        states_BD, metadata, contexts_B = self._reader.read(unread, contexts)
        skipped_B: Tensor | None = None
        if any(ask.num_skipped for ask in asks):
            skipped = np.array([ask.num_skipped for ask in asks])
            (skipped_B,) = to_device([skipped], states_BD.device)
        return DraftStart(
            states_BD=states_BD,
            caches=self._reader.cache.layers,
            contexts_B=contexts_B,
            block_table_BP=metadata.block_table_BP,
            block_size=self._reader.cache.block_size,
            # Tokens of the longest request: no table of blocks reaches further.
            max_seq_len=max(
                context + ask.num_drafts for context, ask in zip(contexts, asks, strict=True)
            ),
            num_skipped_B=skipped_B,
        )


class NetworkLevels:
    """Logits after each node of a level. Its rows are read after the text, and each sees its
    ancestors only. The ranks that share the network read the rows of all G requests together."""

    def __init__(
        self,
        network: DraftNetwork,
        start: DraftStart,
        num_drafts_G: Tensor,
        shares: RequestShares = ALL_HERE,
    ) -> None:
        """
        Args:
            start: of all G requests.
            num_drafts_G: int64, slots of each request after its text.
        """
        self._network, self._start, self._shares = network, start, shares
        self._num_drafts_G = num_drafts_G
        self._states_GED = start.states_BD[:, None]

    @property
    def first_keys_PSGC(self) -> Tensor:
        return self._start.caches[0].k_PSGC

    def static_inputs(self) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
        """Tensors, and the longest text, rounded up so that graphs can be shared."""
        start = self._start
        num_blocks, block_size = start.block_table_BP.shape[1], start.block_size
        seq_len = rounded_grown_len(max(start.max_seq_len, num_blocks * block_size))
        table_BP = pad(start.block_table_BP, (0, -(-seq_len // block_size) - num_blocks))
        tensors = start.states_BD, start.contexts_B, table_BP, start.num_skipped_B
        return (*tensors, self._num_drafts_G), (seq_len,)

    def rebind(
        self, tensors: tuple[Tensor | None, ...], common: tuple[int, ...]
    ) -> "NetworkLevels":
        states_BD, contexts_B, table_BP, num_skipped_B, num_drafts_G = tensors
        assert states_BD is not None
        assert contexts_B is not None
        assert table_BP is not None
        assert num_drafts_G is not None
        start = replace(
            self._start,
            states_BD=states_BD,
            contexts_B=contexts_B,
            block_table_BP=table_BP,
            num_skipped_B=num_skipped_B,
            max_seq_len=common[0],
        )
        return NetworkLevels(self._network, start, num_drafts_G, self._shares)

    def first_logits(self) -> Tensor:
        """[B, V]: after the last token before the drafts."""
        return self._network.logits(self._start.states_BD, self._shares)

    def next_logits(self, frontier: Frontier) -> Tensor:
        """[B, F, V]: after the nodes of a level."""
        every = frontier_of_all(frontier, self._shares)
        shape = every.token_ids_BF.shape
        states_GFD = self._states_GED
        if shape[1] > 1 or states_GFD.shape[1] > 1:
            origins_GF1 = every.origins_BF[:, :, None]
            states_GFD = states_GFD.gather(1, origins_GF1.expand(-1, -1, states_GFD.shape[2]))
        states_RD = self._network.read(
            every.token_ids_BF.flatten(),
            states_GFD.flatten(0, 1),
            self._start.caches,
            self._batch(every),
        )
        self._states_GED = states_RD.view(*shape, -1)
        return self._network.logits(states_RD, self._shares).unflatten(0, (-1, shape[1]))

    def _batch(self, frontier: Frontier) -> AttentionMetadata:
        width = frontier.token_ids_BF.shape[1]
        ancestors_T, positions_T, slots_T = self._network.kernels.place_level(
            frontier.ancestors_BF, frontier.first_row, self._num_drafts_G, self._start
        )
        if self._start.num_skipped_B is not None:
            positions_T = positions_T + self._start.num_skipped_B.repeat_interleave(width)
        lengths_G, number = self._start.contexts_B.int(), len(self._num_drafts_G)
        places_G1 = torch.arange(number + 1, dtype=torch.int32, device=lengths_G.device)
        return AttentionMetadata(
            query_start_B1=places_G1 * width,
            context_lens_B=lengths_G,
            num_causal_B=torch.zeros_like(lengths_G),
            ancestors_T=ancestors_T,
            positions_T=positions_T,
            slots_T=slots_T,
            block_table_BP=self._start.block_table_BP,
            max_rows=width,
            max_seq_len=self._start.max_seq_len,
        )
