"""Random small decoders, and batches of rows for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span
from outdraft.kernels.decoder_ops import DecoderPass, DecoderSpec, LayerSpec, StateEntry
from outdraft.kernels.ops import Kernels
from outdraft.kernels.products import EmbeddingTable
from outdraft.kv.block_pool import LayerCacheShape
from outdraft.kv.cache import KVCache
from tests.row_batches import row_batch

NUM_TOKENS, NUM_POSITIONS, NUM_BLOCKS, BLOCK_SIZE = 61, 400, 60, 8
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Which decoder.

    Attributes:
        entry: None; "pair" or "normed pair": layer 0 reads tokens and states; "fused": by an fc.
        has_final_norm: else there may be one before the head.
    """

    hidden: int = 48
    intermediate: int = 80
    heads: tuple[int, int] = (4, 2)
    head_size: int = 16
    windows: tuple[int | None, ...] = (None, None)
    has_biases: bool = False
    has_head_norms: bool = False
    entry: str | None = None
    has_final_norm: bool = True
    has_draft_ids: bool = False


def make_spec(
    sizes: Sizes,
    kernels: Kernels,
    dtype: torch.dtype,
    seed: int = 0,
    device: torch.device = CPU,
) -> DecoderSpec:
    """Weights are the same numbers in every dtype: those that bfloat16 holds."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(*shape: int, scale: float = 1.0, middle: float = 0.0) -> Tensor:
        values = middle + scale * torch.randn(shape, generator=generator)
        return values.bfloat16().to(device, dtype)

    def product(num_inputs: int, num_outputs: int) -> object:
        bias_E = numbers(num_outputs, scale=0.1) if sizes.has_biases else None
        weight_ED = numbers(num_outputs, num_inputs, scale=num_inputs**-0.5)
        return kernels.pack_linear(weight_ED, bias_E)

    def norm(size: int, *, exists: bool = True) -> Tensor | None:
        weight = numbers(size, scale=0.1, middle=1.0)
        return weight if exists else None

    hidden, (num_heads, num_kv_heads), size = sizes.hidden, sizes.heads, sizes.head_size
    is_pair = sizes.entry in ("pair", "normed pair")
    layers = [
        LayerSpec(
            input_norm_D=norm(hidden, exists=i > 0 or not is_pair),
            post_norm_D=norm(hidden),
            q_norm_C=norm(size, exists=sizes.has_head_norms),
            k_norm_C=norm(size, exists=sizes.has_head_norms),
            qkv=product(
                2 * hidden if i == 0 and is_pair else hidden, (num_heads + 2 * num_kv_heads) * size
            ),
            o=product(num_heads * size, hidden),
            gate_up=product(hidden, 2 * sizes.intermediate),
            down=product(sizes.intermediate, hidden),
            window=window,
        )
        for i, window in enumerate(sizes.windows)
    ]
    entry = None
    if sizes.entry is not None:
        entry = StateEntry(
            token_norm_D=norm(hidden),
            state_norm_D=norm(hidden, exists=is_pair),
            fc=None if is_pair else product(2 * hidden, hidden),
            adds_to_normed=sizes.entry == "normed pair",
        )
    num_outputs = 23 if sizes.has_draft_ids else NUM_TOKENS
    angles_MF = torch.randn(NUM_POSITIONS, size // 2, generator=generator, dtype=torch.float64)
    table_dtype = torch.promote_types(dtype, torch.float32)
    final_norm_D, head_norm_D = norm(hidden), norm(hidden)
    return DecoderSpec(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=sizes.intermediate,
        eps=1e-6,
        scale=size**-0.5,
        embedding=EmbeddingTable.of(numbers(NUM_TOKENS, hidden)),
        cos_sin_MC=torch.cat((angles_MF.cos(), angles_MF.sin()), dim=1).to(device, table_dtype),
        layers=layers,
        attention=kernels.attention,
        final_norm_D=final_norm_D if sizes.has_final_norm else None,
        entry=entry,
        head=product(hidden, num_outputs),
        head_norm_D=None if sizes.has_final_norm else head_norm_D,
        draft_ids_N=torch.randperm(NUM_TOKENS, generator=generator)[:num_outputs].to(device)
        if sizes.has_draft_ids
        else None,
    )


def make_cache(sizes: Sizes, dtype: torch.dtype, device: torch.device = CPU) -> KVCache:
    """Enough for `blocks_of` three requests."""
    shape = LayerCacheShape(sizes.heads[1], sizes.head_size, sizes.head_size)
    return KVCache([shape] * len(sizes.windows), NUM_BLOCKS, BLOCK_SIZE, dtype, device)


def blocks_of(request: int) -> tuple[int, ...]:
    """A third of all blocks, in no order."""
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(7)).tolist()
    return tuple(blocks[request::3])


def batch_of(spans: Sequence[Span]) -> AttentionMetadata:
    return row_batch(spans, BLOCK_SIZE)


def batch_with_logits(spans: Sequence[Span]) -> tuple[AttentionMetadata, Tensor]:
    """The batch, and int64 [R], the rows whose logits are wanted."""
    rows = row_batch(spans, BLOCK_SIZE)
    return rows, rows.logit_rows_R


def filled_cache(sizes: Sizes, dtype: torch.dtype) -> KVCache:
    """As `make_cache`, with random keys and values."""
    cache, generator = make_cache(sizes, dtype), torch.Generator().manual_seed(5)
    for layer in cache.layers:
        for tensor in (layer.k_PSGC, layer.v_PSGE):
            tensor.normal_(generator=generator)
    return cache


def rows_for(num_rows: int, hidden: int, dtype: torch.dtype, seed: int) -> tuple[Tensor, Tensor]:
    """Token ids, and states that bfloat16 holds."""
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(0, NUM_TOKENS, (num_rows,), generator=generator)
    return ids_T, torch.randn(num_rows, hidden, generator=generator).bfloat16().to(dtype)


def read_chunks(
    passes: DecoderPass,
    sizes: Sizes,
    dtype: torch.dtype,
    chunks: Sequence[int],
    taps: Sequence[int] = (),
) -> tuple[Tensor, Tensor, KVCache]:
    """States and taps of one text that is read in chunks, and the cache behind it."""
    cache = make_cache(sizes, dtype)
    ids_T, states_TD = rows_for(sum(chunks), sizes.hidden, dtype, 3)
    states, tapped, start = [], [], 0
    for size in chunks:
        rows = slice(start, start + size)
        metadata = batch_of([Span(start, size, (), blocks_of(0))])
        entry = None if sizes.entry is None else states_TD[rows]
        out_TD, taps_TKD = passes(ids_T[rows], cache.layers, metadata, taps, entry)
        states.append(out_TD)
        tapped.append(taps_TKD)
        start += size
    return torch.cat(states), torch.cat(tapped), cache
