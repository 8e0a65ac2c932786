"""A decoder of 449 million random parameters, and what its passes read and compute.

Dimension key: T rows, R rows whose logits are wanted, D hidden, E outputs, C head size.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outdraft.attention.rows import Span
from outdraft.core.weights import WeightFormat
from outdraft.kernels.decoder_ops import DecoderSpec, LayerSpec
from outdraft.kernels.native.linear import NativeProduct
from outdraft.kernels.ops import Kernels
from outdraft.kernels.products import EmbeddingTable
from outdraft.kv.block_pool import LayerCacheShape
from outdraft.kv.cache import KVCache
from tests.row_batches import row_batch

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 1024, 28, 16, 8, 128
INTERMEDIATE, VOCABULARY, POSITIONS = 3072, 8192, 4096
BLOCK_SIZE, REQUEST_BLOCKS, MAX_REQUESTS = 16, 32, 9
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """The rows of a pass: for each request the tokens in the cache, and the rows behind them.

    Attributes:
        is_prompt: the last request's logits are wanted for its last row only.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    is_prompt: bool = False

    @property
    def num_logits(self) -> int:
        rows = [rows for _, rows in self.requests]
        return sum(rows) - (rows[-1] - 1 if self.is_prompt else 0)

    def cache_bytes(self, layers: int, item_bytes: int) -> int:
        """What attention reads of keys and values."""
        tokens = sum(context + rows for context, rows in self.requests)
        return 2 * layers * tokens * KV_HEADS * HEAD_SIZE * item_bytes

    def operations(self, weights: int, head_weights: int, layers: int) -> int:
        """All products; `weights` are those but the head's. A product and a sum are two.

        Behind the keys and values of the last layer, only rows with logits count.
        """
        rows = sum(rows for _, rows in self.requests)
        with_logits = [rows for _, rows in self.requests]
        with_logits[-1] = 1 if self.is_prompt else with_logits[-1]
        seen, seen_last = 0, 0
        for (context, count), last in zip(self.requests, with_logits, strict=True):
            seen += count * context + count * (count + 1) // 2
            seen_last += last * (context + count) - last * (last - 1) // 2
        attention = 2 * ((layers - 1) * seen + seen_last) * HEADS * HEAD_SIZE
        left_out = weights // layers - 2 * KV_HEADS * HEAD_SIZE * HIDDEN
        products = rows * weights - (rows - self.num_logits) * left_out
        return 2 * (products + self.num_logits * head_weights + attention)


def cases_of(rows: list[int]) -> list[Case]:
    """A drafted chain behind 200 tokens, long ones a prompt; then requests at once."""
    chains = [
        Case(f"{count}", ((200, count),)) if count <= 64 else Case(f"{count}", ((0, count),), True)
        for count in rows
    ]
    eight = ((200, 1),) * 8
    return [
        *chains,
        Case("8 requests", eight),
        Case("prompt of 256", ((0, 256),), True),
        Case("8 requests and the prompt", (*eight, (0, 256)), True),
    ]


class Network:
    """The decoder, with caches for the cases."""

    def __init__(
        self, kernels: Kernels, layers: int, dtype: torch.dtype, quantization: WeightFormat | None
    ) -> None:
        self.products: list[NativeProduct] = []
        generator = torch.Generator().manual_seed(0)

        def product(num_inputs: int, num_outputs: int) -> NativeProduct:
            weight_ED = torch.randn(num_outputs, num_inputs, generator=generator)
            weight_ED = (weight_ED * num_inputs**-0.5).bfloat16().to(dtype)
            packed = kernels.pack_linear(weight_ED, None, quantization)
            assert isinstance(packed, NativeProduct)
            self.products.append(packed)
            return packed

        def layer() -> LayerSpec:
            ones_D, ones_C = torch.ones(HIDDEN), torch.ones(HEAD_SIZE)
            return LayerSpec(
                input_norm_D=ones_D,
                post_norm_D=ones_D,
                q_norm_C=ones_C,
                k_norm_C=ones_C,
                qkv=product(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_SIZE),
                o=product(HEADS * HEAD_SIZE, HIDDEN),
                gate_up=product(HIDDEN, 2 * INTERMEDIATE),
                down=product(INTERMEDIATE, HIDDEN),
                window=None,
            )

        embedding_VD = torch.randn(VOCABULARY, HIDDEN, generator=generator).to(dtype)
        angles = torch.randn(POSITIONS, HEAD_SIZE // 2, generator=generator)
        spec = DecoderSpec(
            num_heads=HEADS,
            num_kv_heads=KV_HEADS,
            intermediate_size=INTERMEDIATE,
            eps=1e-6,
            scale=HEAD_SIZE**-0.5,
            embedding=EmbeddingTable.of(embedding_VD),
            cos_sin_MC=torch.cat((angles.cos(), angles.sin()), dim=1),
            layers=[layer() for _ in range(layers)],
            attention=kernels.attention,
            final_norm_D=torch.ones(HIDDEN),
            head=product(HIDDEN, VOCABULARY),
        )
        self._kernels, self._decoder = kernels, kernels.compile_decoder(spec)
        num_blocks = MAX_REQUESTS * REQUEST_BLOCKS
        shapes = [LayerCacheShape(KV_HEADS, HEAD_SIZE, HEAD_SIZE)] * layers
        self._cache = KVCache(shapes, num_blocks, BLOCK_SIZE, dtype, CPU)
        for one in self._cache.layers:
            one.k_PSGC.normal_(generator=generator)
            one.v_PSGE.normal_(generator=generator)

    def step(self, case: Case) -> Callable[[], int]:
        """A call that makes the pass and the best tokens of its rows; it returns how many."""
        spans = [
            Span(context, rows, (), range(i * REQUEST_BLOCKS, (i + 1) * REQUEST_BLOCKS))
            for i, (context, rows) in enumerate(case.requests)
        ]
        metadata = row_batch(spans, BLOCK_SIZE)
        token_ids_T = torch.arange(len(metadata.slots_T)) % VOCABULARY
        wanted_R = torch.arange(case.num_logits)
        wanted_R[-1] = len(token_ids_T) - 1
        batch = (token_ids_T, self._cache.layers, metadata, (), None, wanted_R)

        def run() -> int:
            best_R: Tensor = self._decoder.best_tokens(self._decoder(*batch)[0])[0]
            return len(best_R)

        return run
