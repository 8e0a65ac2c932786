"""The shape of a language model, as the engine knows it."""

from dataclasses import dataclass, replace
from typing import Self

from outdraft.core.errors import ConfigError
from outdraft.core.weights import can_spread
from outdraft.kv.block_pool import LayerCacheShape

# The options that ask for a number of ranks.
TARGET_RANKS, DRAFT_RANKS = "--tensor-parallel-size", "draft_tensor_parallel_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The shape of one decoder-only model.

    Attributes:
        architecture: as config.json names it.
        num_heads, num_kv_heads, head_size: the largest of all layers.
        intermediate_size: of the feed-forward block, as far as one row computes it.
        max_model_len: tokens of the longest text that it reads.
        eos_token_ids: every token that ends a text, as generation_config.json names them, else
            config.json.
        torch_dtype: what the checkpoint was saved in, such as "bfloat16", None if unknown.
        layers: what each layer keeps of a token; empty: all keep keys and values of these sizes.
        depends_on_context: weights or positions are others with another max_model_len.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_model_len: int
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    torch_dtype: str | None
    layers: tuple[LayerCacheShape, ...] = ()
    depends_on_context: bool = False

    @property
    def cache_shapes(self) -> tuple[LayerCacheShape, ...]:
        """The cache of each layer for one token."""
        one = LayerCacheShape(self.num_kv_heads, self.head_size, self.head_size)
        return self.layers or (one,) * self.num_layers

    def shard(self, size: int, flag: str = TARGET_RANKS) -> Self:
        """The part that each of `size` ranks has: heads, kv heads and the width of the feed-forward
        block. Where there are fewer kv heads than ranks, several ranks have the same one.

        Args:
            flag: the option that asked for the size.

        Raises:
            ConfigError: the model cannot be divided so.
        """
        if size == 1:
            return self
        if not self._divides_into(size):
            sizes = [one for one in range(1, self.num_heads + 1) if self._divides_into(one)]
            raise ConfigError(
                f"{flag} {size} does not divide this model, which has {self.num_heads} attention "
                f"heads, {self.num_kv_heads} key-value heads, an intermediate size of "
                f"{self.intermediate_size} and {self.vocab_size} tokens: choose "
                f"{', '.join(map(str, sizes))}"
            )
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            intermediate_size=self.intermediate_size // size,
        )

    def _divides_into(self, size: int) -> bool:
        least, most = sorted((size, self.num_kv_heads))
        is_even = self.num_heads % size == 0 and self.intermediate_size % size == 0
        return is_even and most % least == 0 and can_spread(self.vocab_size, size)
