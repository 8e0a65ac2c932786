"""EAGLE drafters: one decoder layer or a few that continue from the target's hidden states.

EAGLE (Li et al. 2024, arXiv 2401.15077) reads the token behind position i together with the
target's state of position i, and writes a state like it, from which the target's own head predicts
the token after that. EAGLE-3 (Li et al. 2025, arXiv 2503.01840) reads states that are tapped
between the target's layers, and has a head of its own, often for the frequent tokens only. In both,
the next drafted token is read together with the drafter's own state, in place of the target's.

Dimension key: T rows, R rows that need logits, Q of them on this rank, D hidden of the drafter, F
what is kept of the target's pass for a row, S hidden of the target, K taps, N draft vocabulary, V
vocabulary.
"""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from torch import Tensor, nn

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.core.draft import DraftSource
from outdraft.core.weight_format import WeightFormat
from outdraft.distributed.request_shares import ALL_HERE, RequestShares
from outdraft.kernels.decoder_ops import DecoderPass
from outdraft.kernels.draft_ops import Growth, ModelDrafts, UnreadTexts
from outdraft.models.checkpoints.slots import Slot, slot_of
from outdraft.models.decoder.layers import Decoder, Kind
from outdraft.models.decoder.linear import memory_bytes, pack_linears
from outdraft.models.decoder.norm import RMSNorm, norm_weight
from outdraft.models.drafters.eagle_config import EagleConfig
from outdraft.models.drafters.eagle_layers import Entry, TapFusion
from outdraft.models.drafters.tables import DrafterTables
from outdraft.models.drafters.target_tables import TargetTables
from outdraft.models.shape import DRAFT_RANKS


class EagleNetwork(nn.Module):
    """An EAGLE drafter over a paged cache of its own. Weights are not initialised.

    Its row for position i of a text reads the token at i + 1 and the features of position i; its
    keys are at cache index i.

    Attributes:
        taps: behind how many of the target's layers `features` wants the residual streams.
        feature_size: F.
        shard: its layers as this rank has them, which is the shape of its cache.
    """

    def __init__(
        self, config: EagleConfig, tables: TargetTables, draft_ids_N: Tensor | None
    ) -> None:
        """As the target's numbers and kernels are, spread over the ranks of the tables.

        Args:
            draft_ids_N: int64, the target's id of each draft token; None: it has the same ids.

        Raises:
            ConfigError: the target does not have the layers that the config taps, or the drafter
                cannot be divided over its ranks.
        """
        super().__init__()
        layer, target, group = config.layer, tables.target, tables.group
        self.shard = layer.shard(group.size, DRAFT_RANKS)
        kind = Kind(dtype=target.dtype, device=target.device)
        self.config, self.kernels = config, target.kernels
        self.dtype, self.device = target.dtype, target.device
        self.taps = config.taps_of(target.config.num_layers)
        self.feature_size = layer.hidden_size
        self.tables = DrafterTables(config, tables, draft_ids_N)
        self.fusion: TapFusion | None = None
        if config.version is DraftSource.EAGLE3:
            self.fusion = TapFusion(config, len(self.taps), kind)
        self.entry = Entry(config, kind)
        has_first_norm = self.fusion is None and config.input_norm
        self.decoder = Decoder(
            layer,
            self.kernels,
            kind,
            self.entry.num_outputs,
            has_first_norm=has_first_norm,
            group=group,
        )
        # EAGLE has a final norm only by exception.
        has_norm = config.version is DraftSource.EAGLE3 or config.layernorms
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps, **kind) if has_norm else None
        self.mask_hidden: nn.Parameter | None = None
        if config.mask_shape is not None:
            mask = torch.empty(config.mask_shape, **kind)
            self.mask_hidden = nn.Parameter(mask, requires_grad=False)

    def features(self, hidden_TD: Tensor, tapped_TKS: Tensor) -> Tensor:
        """[T, F]: what a row reads of the target's pass over its position.

        Args:
            hidden_TD: the target's states behind its final norm: EAGLE reads them as they are.
            tapped_TKS: the residual streams of `taps` in their order.
        """
        return hidden_TD if self.fusion is None else self.fusion(tapped_TKS.flatten(1))

    def mask_state(self) -> Tensor:
        """[D]: what `forward` reads for a state not known yet; only if `has_mask_state`."""
        assert self.mask_hidden is not None, "the checkpoint has no mask_hidden"
        state = self.mask_hidden.data.flatten()
        if self.fusion is not None and len(state) == self.fusion.num_inputs:
            return self.fusion(state[None])[0]
        return state

    @property
    def has_mask_state(self) -> bool:
        """Whether it was trained to draft several tokens in one pass (P-EAGLE, 2602.01469)."""
        return self.mask_hidden is not None

    @cached_property
    def passes(self) -> DecoderPass:
        """What the network computes, once its weights and the target's are packed."""
        is_fed_back = self.config.norm_output
        return self.tables.compile_passes(
            self.decoder,
            final_norm=self.norm if is_fed_back else None,
            head_norm=None if is_fed_back else self.norm,
            entry=self.entry.spec(),
        )

    def forward(
        self,
        token_ids_T: Tensor,
        states_TF: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        """The state of each row, [T, D]: for `logits`, and for the rows that continue it.

        Writes the keys and values of the rows to the caches, one cache a layer.

        Args:
            token_ids_T: int64, the token behind each row's position.
            states_TF: `features` of the row's position; in a draft, the state of its parent.
        """
        return self.passes(token_ids_T, caches, metadata, states_TD=states_TF)[0]

    def logits(self, states_RD: Tensor, shares: RequestShares = ALL_HERE) -> Tensor:
        """[Q, V] over the target's vocabulary, of the rows that are this rank's; -inf where the
        drafter has no such token."""
        logits_QN = shares.turn(self.passes.logits(states_RD), self.tables.num_drafted)
        return self.tables.over_vocabulary(logits_QN)

    def draft(
        self, unread: UnreadTexts, growth: Growth, by_levels: Callable[[], ModelDrafts]
    ) -> ModelDrafts:
        """As `DecoderPass.draft`."""
        return self.passes.draft(unread, growth, by_levels)

    @property
    def memory_bytes(self) -> int:
        """What its own weights take, packed ones included, and copies of the target's."""
        return memory_bytes(self) + self.tables.copied_bytes

    @property
    def weight_bytes(self) -> int:
        """Weights that one step of a draft reads as they lie in memory, the target's head included.

        A step reads a few rows of the embedding table only; taps are fused once a draft.
        """
        unread = [self.tables.embed_tokens, self.fusion]
        bytes_read = memory_bytes(self) - sum(
            memory_bytes(part) for part in unread if part is not None
        )
        if self.mask_hidden is not None:
            bytes_read -= self.mask_hidden.nbytes
        return bytes_read + self.tables.borrowed_bytes

    def checkpoint_slots(self) -> dict[str, Slot]:
        """Where each tensor of a checkpoint belongs: views into this network; before packing.

        The names are those of EAGLE's repository, with layers.0 for its midlayer.
        """
        slots: dict[str, Slot | None] = dict(self.entry.slots())
        if self.fusion is not None:
            slots |= dict(self.fusion.slots())
        for _, layer_slots in self.decoder.parts(""):
            slots |= layer_slots
        norm = "norm" if self.fusion is not None else "pre_lm_head_layernorm"
        slots[f"{norm}.weight"] = slot_of(norm_weight(self.norm))
        slots |= self.tables.slots()
        slots["mask_hidden"] = slot_of(self.mask_hidden)
        return {name: slot for name, slot in slots.items() if slot is not None}

    def pack(self, quantization: WeightFormat | None = None) -> None:
        """Make its own products, once and for good."""
        pack_linears(self, self.kernels, quantization)
