"""A language model whose network is a decoder: Llama, Mistral, Qwen 2 and Qwen 3.

Dimension key: T rows, R rows that need logits, D hidden, V vocabulary, K tapped layers.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.draft_ops import Growth, ModelDrafts, UnreadTexts
from outdraft.kernels.ops import DecoderPass, Kernels
from outdraft.models.config import ModelConfig
from outdraft.models.decoder import Decoder, Kind
from outdraft.models.layers.embedding import Embedding
from outdraft.models.layers.linear import Linear, linears_of, memory_bytes, pack_linears
from outdraft.models.layers.norm import RMSNorm


class CausalLM(nn.Module):
    """A decoder-only language model over a paged cache. Weights are not initialised."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        kind = Kind(dtype=dtype, device=torch.device(device))
        self.config, self.kernels = config, kernels
        self.dtype, self.device = dtype, kind["device"]
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, **kind)
        self.decoder = Decoder(config, kernels, kind)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, **kind)
        self.lm_head = Linear(
            config.hidden_size,
            config.vocab_size,
            bias=False,
            **kind,
            weight=self.embed_tokens.weight if config.tie_word_embeddings else None,
        )
        self._passes: DecoderPass | None = None

    @property
    def passes(self) -> DecoderPass:
        """What the network computes, once its weights are packed."""
        if self._passes is None:
            embedding_VD = self.embed_tokens.weight.data
            self._passes = self.decoder.compile_passes(
                embedding_VD, self.lm_head, final_norm=self.norm
            )
        return self._passes

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
    ) -> tuple[Tensor, Tensor]:
        """The hidden state of each row behind the final norm, [T, D], and the residual stream
        behind the first taps[k] layers, [T, K, D], all of the model's dtype.

        Writes the keys and values of the rows to the caches, one cache a layer.

        Args:
            token_ids_T: int64; the positions of the metadata are below max_model_len.
            taps: each from 0 (the embedding) to the number of layers.
        """
        return self.passes(token_ids_T, caches, metadata, taps)

    def logits(self, hidden_RD: Tensor) -> Tensor:
        """[R, V] of float32; of float64 for a float64 model."""
        return self.passes.logits(hidden_RD)

    def checked_best_tokens(self, hidden_RD: Tensor) -> tuple[Tensor, Tensor]:
        """The best tokens; bool [R]: the logits have a best one: no NaN or inf, not all -inf."""
        return self.passes.best_tokens(hidden_RD)

    def draft(
        self, unread: UnreadTexts, growth: Growth, by_levels: Callable[[], ModelDrafts]
    ) -> ModelDrafts:
        """As `DecoderPass.draft`."""
        return self.passes.draft(unread, growth, by_levels)

    @property
    def weight_bytes(self) -> int:
        """Weights that one step reads as they lie in memory, whatever the number of rows.

        A step reads a few rows of the embedding table only. The table counts as the head alone:
        in a tied model that is not packed.
        """
        table = self.embed_tokens.weight
        return self.memory_bytes - (0 if self.lm_head.weight is table else table.nbytes)

    @property
    def numbers(self) -> str:
        """What is computed, over which weights if they are kept otherwise: for people."""
        name = str(self.dtype).removeprefix("torch.")
        kept = {linear.format for linear in linears_of(self)} - {WeightFormat.PLAIN, name}
        return f"{name} over {' and '.join(sorted(kept))} weights" if kept else name

    @property
    def memory_bytes(self) -> int:
        """What the weights take, packed ones included; a packed tied head is a copy."""
        return memory_bytes(self)

    def checkpoint_slots(self) -> dict[str, Tensor]:
        """Where each tensor of a Hugging Face checkpoint belongs: a view into this model.

        Only before the weights are packed. The head of a tied model has no place of its own.
        """
        return {name: slot for _, slots in self.parts() for name, slot in slots.items()}

    def parts(self) -> Iterator[tuple[nn.Module, dict[str, Tensor]]]:
        """The layers and the head with their parts of `checkpoint_slots`; what belongs to neither
        comes with the head."""
        yield from self.decoder.parts("model.")
        rest = {
            "model.embed_tokens.weight": self.embed_tokens.weight.data,
            "model.norm.weight": self.norm.weight.data,
        }
        if not self.config.tie_word_embeddings:
            assert self.lm_head.weight is not None, "the weights are packed"
            rest["lm_head.weight"] = self.lm_head.weight.data
        yield self.lm_head, rest

    def pack(self, quantization: WeightFormat | None = None) -> None:
        """Make all products, once and for good.

        A packed head is a copy: the table of a tied model stays plain, as the embedding needs it.
        """
        pack_linears(self, self.kernels, quantization)
