"""DFlash drafters: one pass drafts a block of tokens (Chen et al. 2026, arXiv 2602.06036).

The network is a few layers of Qwen 3. A pass reads the newest token and mask tokens after it, and
every row of such a block may see all others. It reads no tokens of the text before: the keys and
values of a text's token are made of the target's streams at that token, tapped between the target's
layers. So the drafter catches up with a text without attention: one product fuses the streams, and
one gives the keys and values of all layers. The embedding and mostly the head are the target's.

DSpark (arXiv 2607.05147) adds two heads. One adds logits that depend on the token before a draft,
so that tokens are drawn one after the other from one pass. The other says from the row of a
draft, and from the token before it, how likely the draft is accepted.

Dimension key: T rows, R rows that need logits, Q of them on this rank, D hidden, S hidden of the
target, K taps, N draft vocabulary, V vocabulary, M rank of pairs.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import BlockSpec, Growth, UnreadTexts
from outdraft.models.checkpoints.config_json import read_json
from outdraft.models.checkpoints.files import Place, tensor_places, weight_files
from outdraft.models.checkpoints.slots import Slot, own_slots
from outdraft.models.decoder.layers import Decoder, Kind, product_of
from outdraft.models.drafters.config import DFlashConfig
from outdraft.models.drafters.tables import (
    OF_TRAINING,
    LayeredDrafter,
    TargetTables,
    drop_the_targets_head,
)
from outdraft.models.modules import Linear, RMSNorm, linears_of


class SparkHeads(nn.Module):
    """The two heads that DSpark adds to DFlash; every rank has them whole."""

    def __init__(self, config: DFlashConfig, kind: Kind) -> None:
        super().__init__()
        rank, self._reads_token = config.markov_rank, config.confidence_reads_token
        self.markov_w1: nn.Embedding | None = None
        self.markov_w2: Linear | None = None
        if rank:
            table_VM = torch.empty(config.layer.vocab_size, rank, **kind)
            self.markov_w1 = nn.Embedding.from_pretrained(table_VM)
            self.markov_w2 = Linear(rank, config.draft_vocab_size, bias=False, **kind)
        self.confidence: Linear | None = None
        if config.has_confidence:
            num_inputs = config.layer.hidden_size + (rank if self._reads_token else 0)
            self.confidence = Linear(num_inputs, 1, bias=True, **kind)

    def pair_logits(self, token_ids_R: Tensor) -> Tensor:
        """[R, N] in the network's dtype: the logits to add after these tokens."""
        assert self.markov_w1 is not None
        assert self.markov_w2 is not None
        return self.markov_w2(self.markov_w1(token_ids_R))

    def confidences(self, states_RD: Tensor, token_ids_R: Tensor) -> Tensor:
        """float32 [R]: the log-odds that drafts from these rows, after these tokens, are accepted
        if all before them were."""
        assert self.confidence is not None
        inputs = [states_RD]
        if self._reads_token:
            assert self.markov_w1 is not None
            inputs.append(self.markov_w1(token_ids_R))
        return self.confidence(torch.cat(inputs, dim=1))[:, 0].float()

    def added_to(self, spec: BlockSpec) -> BlockSpec:
        """The spec with these heads, once they are packed."""
        if self.markov_w1 is not None and self.markov_w2 is not None:
            pairs, table_VM = product_of(self.markov_w2), self.markov_w1.weight.data
            spec = replace(spec, pairs=pairs, pair_embedding_VM=table_VM)
        if self.confidence is None:
            return spec
        confidence = product_of(self.confidence)
        return replace(spec, confidence=confidence, confidence_reads_token=self._reads_token)

    def slots(self) -> dict[str, Slot]:
        """The places of the tensors of these heads, by their names."""
        return {
            **own_slots(self.markov_w1, "markov_head.markov_w1."),
            **own_slots(self.markov_w2, "markov_head.markov_w2."),
            **own_slots(self.confidence, "confidence_head.proj."),
        }


class DFlashNetwork(LayeredDrafter):
    """A drafter of blocks. Weights are not initialised.

    Attributes:
        heads: DSpark's; None: it is DFlash.
    """

    def __init__(self, config: DFlashConfig, tables: TargetTables, found: dict[str, Place]) -> None:
        super().__init__(config, tables, found)
        layer, kind, self.config = config.layer, self.kind, config
        num_inputs = len(config.taps) * config.target_hidden_size
        self.fc = Linear(num_inputs, layer.hidden_size, bias=False, **kind)
        self.hidden_norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps, **kind)
        # The last block of the longest text reaches so far.
        num_positions = layer.max_model_len + config.block_size
        self.decoder = Decoder(
            layer, self.kernels, kind, group=tables.group, num_positions=num_positions
        )
        self._kv_size = self.shard.num_kv_heads * layer.head_size
        num_outputs = layer.num_layers * 2 * self._kv_size
        self.context_kv = Linear(layer.hidden_size, num_outputs, bias=layer.qkv_bias, **kind)
        self.norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps, **kind)
        has_heads = config.markov_rank > 0 or config.has_confidence
        self.heads = SparkHeads(config, kind) if has_heads else None

    def features(self, tapped_TKS: Tensor) -> Tensor:
        """[T, D]: what keys and values of a text's tokens are made of.

        Args:
            tapped_TKS: the target's residual streams of `taps` in their order.
        """
        return self.hidden_norm(self.fc(tapped_TKS.flatten(1)))

    def write_context(
        self, features_TD: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata
    ) -> None:
        """Write the keys and values of tokens of texts, in every layer, where the rows stand."""
        context, positions_T = product_of(self.context_kv), metadata.positions_T
        self.passes.write_context(context, features_TD, caches, positions_T, metadata.slots_T)

    def pass_options(self) -> dict[str, Any]:
        is_causal = None if self.is_uniform else self.config.is_causal
        return {"final_norm_D": self.norm.weight.data, "is_causal": is_causal}

    @property
    def is_uniform(self) -> bool:
        """Is true if a block's rows see the same of their block in all layers."""
        return len(set(self.config.is_causal)) == 1

    def forward(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        wanted_R: Tensor | None = None,
    ) -> Tensor:
        """[R, D]: the states of the wanted rows after the final norm.

        Args:
            token_ids_T: int64, blocks: rows without causal ones before them.
            wanted_R: as in DecoderPass.
        """
        return self.passes(token_ids_T, caches, metadata, wanted_R=wanted_R)[0]

    def draft(self, unread: UnreadTexts, growth: Growth) -> DraftBatch | None:
        """Draft a block in one call, as `FusedPasses.draft_block`; None: it cannot."""
        if (fused := self.passes.fused) is None:
            return None
        return fused.draft_block(self._block, unread, growth)

    @cached_property
    def _block(self) -> BlockSpec:
        """Once the products are packed."""
        config = self.config
        spec = BlockSpec(
            num_rows=config.block_size,
            first_draft=config.block_size - config.num_drafts,
            mask_token_id=config.mask_token_id,
            is_causal=self.is_uniform and config.is_causal[0],
            context=product_of(self.context_kv),
        )
        return spec if self.heads is None else self.heads.added_to(spec)

    @property
    def weight_bytes(self) -> int:
        """Weights that a pass reads as they lie in memory, the target's head included."""
        return self.bytes_read(self.heads and self.heads.markov_w1)

    def checkpoint_slots(self) -> dict[str, Slot]:
        return {
            **own_slots(self.fc, "fc."),
            **own_slots(self.hidden_norm, "hidden_norm."),
            **own_slots(self.norm, "norm."),
            **super().checkpoint_slots(),
            **(self.heads.slots() if self.heads else {}),
        }

    def pack(self, quantization: WeightFormat | None) -> None:
        """Make its own products, once and for good, when the weights are there. The taps' is not
        quantized: a small error there is one of every draft."""
        for index, layer in enumerate(self.decoder.decoder_layers):
            # Its keys and values, which a pass over a block reads with its queries.
            rows = slice(2 * index * self._kv_size, 2 * (index + 1) * self._kv_size)
            own, fused = self.context_kv, layer.qkv_proj
            for to, weight in ((own.weight, fused.weight), (own.bias, fused.bias)):
                if to is not None and weight is not None:
                    to.data[rows] = weight.data[-2 * self._kv_size :]
        for linear in linears_of(self):
            linear.pack(self.kernels, None if linear is self.fc else quantization)


def load_dflash(
    path: Path, tables: TargetTables, quantization: WeightFormat | None = None
) -> DFlashNetwork:
    """The drafter of a checkpoint directory, ready to run; raises as load_eagle."""
    config = DFlashConfig.from_mapping(read_json(path / "config.json"))
    found = tensor_places(weight_files(path), _canonical_name)
    if config.draft_vocab_size == config.layer.vocab_size:
        drop_the_targets_head(found, tables.target, tables.path)
    return DFlashNetwork(config, tables, found).filled(found, quantization)


def _canonical_name(name: str) -> str | None:
    """The name in DFlash's own files."""
    name = name.removeprefix("model.")
    return None if name in OF_TRAINING else name
