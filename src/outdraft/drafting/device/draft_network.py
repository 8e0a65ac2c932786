"""The networks that draft by reading tokens: small models, EAGLE and MTP layers.

A language model reads a token; its cache has everything else that it needs. EAGLE (arXiv 2401.15077
and 2503.01840) reads a token together with a state of the text before it. That state is the
target's where the target has read the text, else EAGLE's own.

Dimension key: T rows, R rows whose logits are needed, Q of them on this rank, D state, V the
target's vocabulary.
"""

from collections.abc import Sequence

from torch import Tensor

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.drafting.device.asks import TargetStates
from outdraft.drafting.device.translated_model import DraftModel, TranslatedModel
from outdraft.kernels.decoder_ops import FusedPasses
from outdraft.models.base import StateNetwork


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
        self.network = network
        self.token_shift, self.feature_size, self.taps = 0, 0, ()
        self._model: DraftModel | None = None
        self._on_states: StateNetwork | None = None
        if isinstance(network, StateNetwork):
            self.token_shift, self.feature_size, self.taps = 1, network.feature_size, network.taps
            self._on_states = network
        else:
            self._model = network
        self.reads_hidden = self._on_states is not None and not self.taps
        self.kernels = network.kernels

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
