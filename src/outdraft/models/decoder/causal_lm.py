"""A language model whose network is a decoder: Llama, Mistral, Qwen 2, Qwen 3 and MiMo.

Dimension key: T rows, R rows that need logits, D hidden, V vocabulary, S columns of logits on each
rank, K tapped layers.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import ALONE, RankGroup
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.kernels.decoder_ops import DecoderPass, FusedPasses
from outdraft.kernels.ops import Kernels, Product
from outdraft.kernels.products import EmbeddingTable, VocabParallel
from outdraft.models.checkpoints.slots import Slot, rows_of
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.decoder.layers import Decoder, Kind, drafted_share, first_drafts, product_of
from outdraft.models.modules import (
    Linear,
    RMSNorm,
    is_one_tensor,
    memory_bytes,
    numbers_of,
    pack_linears,
)
from outdraft.models.shape import DRAFT_RANKS, TARGET_RANKS

EMBEDDING_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"


class CausalLM(nn.Module):
    """A `LanguageModel` of a family that has a network here. Weights are not initialised."""

    routed = None  # it has no experts

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        group: RankGroup = ALONE,
        *,
        drafts: bool = False,
    ) -> None:
        """
        Args:
            drafts: it is a drafter, of as many ranks as were asked for it.

        Raises:
            ConfigError: the model cannot be divided over the group.
        """
        super().__init__()
        kind = Kind(dtype=dtype, device=torch.device(device))
        self.shard = config.shard(group.size, DRAFT_RANKS if drafts else TARGET_RANKS)
        self.config, self.kernels, self.group = config, kernels, group
        self._drafts = drafts
        self.dtype, self.device = dtype, kind["device"]
        self.vocabulary = VocabularyShard(group, config.vocab_size)
        num_tokens = self.vocabulary.num_own
        table_VD = torch.empty(num_tokens, config.hidden_size, **kind)
        self.embed_tokens = EmbeddingTable.of(table_VD)
        self.embed_weight: nn.Parameter | None = nn.Parameter(table_VD, requires_grad=False)
        self._table_bytes = 0  # of codes that the head does not count
        self.decoder = Decoder(config, kernels, kind, group=group)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **kind)
        self.lm_head = Linear(
            config.hidden_size,
            num_tokens,
            bias=False,
            **kind,
            weight=self.embed_weight if config.tie_word_embeddings else None,
            spread=None if group.size == 1 else partial(VocabParallel, self.vocabulary),
        )

    @cached_property
    def passes(self) -> DecoderPass:
        """The network's computation, once its weights are packed."""
        return self.decoder.compile_passes(
            embedding=self.embed_tokens,
            head=product_of(self.lm_head),
            final_norm_D=self.norm.weight.data,
            num_first_drafts=first_drafts(self.vocabulary) if self._drafts else 0,
            shard=None if self.group.size == 1 else self.vocabulary,
        )

    def forward(
        self, token_ids_T: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata
    ) -> Tensor:
        """The first part of `forward_tapped`."""
        return self.passes(token_ids_T, caches, metadata)[0]

    def forward_tapped(
        self,
        token_ids_T: Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        taps: Sequence[int],
        wanted_R: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The hidden states after the final norm, and the residual streams of the taps."""
        return self.passes(token_ids_T, caches, metadata, taps, None, wanted_R)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        return self.passes.logits(hidden_RD)

    def checked_best_tokens(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        return self.passes.best_tokens(hidden_RD)

    @property
    def fused(self) -> FusedPasses | None:
        return self.passes.fused

    @property
    def weight_bytes(self) -> int:
        """Weights that one step reads as they lie in memory, whatever the number of rows.

        A step reads a few rows of the embedding table only. The table counts as the head alone:
        in a tied model that is not packed.
        """
        table, unread = self.embed_tokens, 0
        if self._drafts:
            unread = int((1 - drafted_share(self.vocabulary)) * self.lm_head.packed_bytes)
        if not is_one_tensor(table, self.lm_head):
            unread += table.nbytes
        return self.memory_bytes - unread

    @property
    def numbers(self) -> str:
        return numbers_of(self, self.dtype)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights, packed ones included; a packed tied head is a copy."""
        return memory_bytes(self) + self._table_bytes

    def keep_codes(self, product: Product, *, is_shared: bool) -> None:
        """Read the embedding from the codes of a product; its numbers are freed.

        `is_shared`: it is the head's.
        """
        old = self.embed_tokens
        self.embed_tokens = EmbeddingTable(product, old.num_tokens, old.size, old.dtype)
        self.embed_weight, self._table_bytes = None, 0 if is_shared else product.nbytes

    def checkpoint_slots(self) -> dict[str, Slot]:
        """The place of each tensor of a Hugging Face checkpoint: views into this model.

        Only before the weights are packed. The head of a tied model has no place of its own.
        """
        return {name: slot for _, slots in self.parts() for name, slot in slots.items()}

    def parts(self) -> Iterator[tuple[nn.Module, dict[str, Slot]]]:
        """The layers and the head with their parts of `checkpoint_slots`; what belongs to neither
        comes with the head."""
        yield from self.decoder.parts("model.")
        tokens = self.vocabulary
        rest = {
            EMBEDDING_NAME: rows_of(tokens, self.embed_weight),
            "model.norm.weight": Slot(self.norm.weight.data),
        }
        if not self.config.tie_word_embeddings:
            rest[HEAD_NAME] = rows_of(tokens, self.lm_head.weight)
        yield self.lm_head, rest

    def pack(self, quantization: WeightFormat | None = None) -> None:
        """Make all products, once and for good.

        A packed head is a copy: the table of a tied model stays plain, as the embedding needs it.
        """
        pack_linears(self, self.kernels, quantization)
