"""Drafts all tokens of a chain in one pass (PARD, An et al. 2025, arXiv 2504.18583).

Behind the newest token the network reads mask tokens: one for every draft but the first, as causal
rows at the positions of the drafts. The row of the newest token gives the first draft, and the row
of each mask token gives the next one. So no draft depends on the drafts before it. The keys and
values of the mask tokens have no use later: whatever is accepted, the network counts as having read
the text up to the newest token only.

Networks that read states beside tokens (P-EAGLE, arXiv 2602.01469) have a learned state for the
mask tokens, which stands in for the target's.

Dimension key: B requests that draft, K drafts, V vocabulary, T rows, S state rows, L tokens,
D state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import Span, lay_out, send
from outdraft.core.draft import MAX_DRAFTS, DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.plan import ModelDrafting
from outdraft.drafting.device.backlog import catch_up, text_places, whole_span
from outdraft.drafting.device.draft_network import DraftNetwork
from outdraft.drafting.device.draft_sampling import drafting_parameters, sample_drafts
from outdraft.drafting.device.model_drafts import (
    DraftModelAsk,
    ModelDrafts,
    sampled_chains,
    without_surplus,
)
from outdraft.drafting.device.target_states import TargetStates
from outdraft.kv.cache import KVCache
from outdraft.kv.feature_cache import FeatureCache
from outdraft.models.config import read_json
from outdraft.sampling.batch import SamplingBatch

_KEYS = ("pard_token", "mask_token_id", "ptd_token_id")


@dataclass(frozen=True, slots=True)
class MaskTokens:
    """What the network reads in place of the drafts.

    Attributes:
        token_id: of the network's vocabulary.
        state_D: what it reads beside a mask token, for a network that reads states.
        features: where the states of the text's tokens are, for the same network.
    """

    token_id: int
    state_D: Tensor | None = None
    features: FeatureCache | None = None

    def __post_init__(self) -> None:
        if (self.state_D is None) != (self.features is None):
            raise ValueError("a mask state and the features of the text go together")


def mask_token_id(path: Path, vocab_size: int) -> int:
    """The mask token that the config.json of a checkpoint directory names.

    Raises:
        ConfigError: it names none, or one outside of the vocabulary: the checkpoint was not
            trained to draft in parallel.
    """
    raw = read_json(path / "config.json")
    key = next((key for key in _KEYS if raw.get(key) is not None), None)
    if key is None:
        raise ConfigError(
            f"{path} was not trained for parallel drafting: its config.json has none of "
            f"{', '.join(_KEYS)}"
        )
    value = raw[key]
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise ConfigError(
            f"config.json: {key} must be a token id below {vocab_size}, got {value!r}"
        )
    return value


class ParallelDraftProposer:
    """Drafts chains with a network that was trained to read mask tokens."""

    def __init__(
        self,
        network: DraftNetwork,
        cache: KVCache,
        max_rows: int,
        source: DraftSource,
        masks: MaskTokens,
        *,
        samples: bool,
    ) -> None:
        """`samples`: draw drafts from the network's distributions instead of taking the best."""
        self.network = network
        self.cache = cache
        self.masks = masks
        self.reads_states = network.lag > 0
        self.drafting = ModelDrafting(source, max_kept=-network.lag)
        self.max_drafts, self.max_passes = MAX_DRAFTS, 1
        self._max_rows = max_rows
        self._samples = samples

    @property
    def taps(self) -> tuple[int, ...]:
        """Residual streams of the target that `keep` needs."""
        return self.network.taps

    def keep(self, states: TargetStates) -> None:
        """The target has computed these."""
        self.network.keep(states)

    def propose(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, sampling: SamplingBatch
    ) -> ModelDrafts:
        """Draft for all asks; `sampling` has their requests in the same order."""
        masks = [self.masks.token_id] * max(ask.num_drafts - 1 for ask in asks)
        masked = [
            replace(ask, continued=(*ask.continued, *masks[: ask.num_drafts - 1])) for ask in asks
        ]
        masked = catch_up(
            masked,
            self.network.lag,
            self._max_rows,
            lambda few, spans: self._read(few, spans, token_ids_SL),
        )
        spans = [whole_span(ask, self.network.lag) for ask in masked]
        places = _places(asks, spans)
        states_TD, [rows_R, request_R, positions_R, anchors_R] = self._read(
            masked, spans, token_ids_SL, places
        )
        states_RD = states_TD[rows_R]
        num_drafts = [ask.num_drafts for ask in asks]
        shape = (len(asks), max(num_drafts))
        sampling = drafting_parameters(sampling)
        if sampling.is_plain_greedy or not self._samples:
            drafts = ModelDrafts(self.network.best_tokens(states_RD).view(shape))
        else:
            logits_RV = self.network.logits(states_RD)
            ids_R, probs_RV = sample_drafts(logits_RV, request_R, positions_R, anchors_R, sampling)
            drafts = sampled_chains(ids_R.view(shape), probs_RV.view(*shape, -1), sampling)
        return without_surplus(drafts, num_drafts)

    def _read(
        self,
        asks: Sequence[DraftModelAsk],
        spans: Sequence[Span],
        token_ids_SL: Tensor,
        extra: Sequence[np.ndarray] = (),
    ) -> tuple[Tensor, list[Tensor]]:
        """The states of all rows, [T, D], and `extra` on the device."""
        layout = lay_out(spans, self.cache.block_size, self.network.kernels)
        flat_T, given_T = text_places(
            asks, spans, layout.placed.positions_T, self.network.lag, token_ids_SL.shape[1]
        )
        metadata, (flat, given, *sent) = send(
            layout, [flat_T, given_T, *extra], token_ids_SL.device
        )
        ids_T = torch.where(given < 0, token_ids_SL.view(-1)[flat], given)
        states_TD: Tensor | None = None
        if self.masks.state_D is not None and self.masks.features is not None:
            # What was drafted before by others has no state of the target's either.
            features_TD = self.masks.features.read(metadata.slots_T)
            states_TD = torch.where(given[:, None] < 0, features_TD, self.masks.state_D)
        return self.network.read(ids_T, states_TD, self.cache.layers, metadata), sent


def _places(asks: Sequence[DraftModelAsk], spans: Sequence[Span]) -> list[np.ndarray]:
    """For each of the B * K drafts: its row of the pass, its request, its position in the text and
    the length of that. Who wants fewer than K has its last one repeated."""
    num_drafts_B1 = np.array([[ask.num_drafts] for ask in asks])
    num_tokens_B1 = np.array([[ask.num_tokens] for ask in asks])
    starts_B1 = np.array([[ask.num_tokens + len(ask.continued)] for ask in asks])
    ends_B1 = np.array([[span.num_causal] for span in spans]).cumsum(0)
    draft_BK = np.minimum(np.arange(num_drafts_B1.max()), num_drafts_B1 - 1)
    return [
        (ends_B1 - num_drafts_B1 + draft_BK).ravel(),
        np.arange(len(asks)).repeat(draft_BK.shape[1]),
        (starts_B1 + draft_BK).ravel(),
        num_tokens_B1.repeat(draft_BK.shape[1], axis=1).ravel(),
    ]
