"""Ragged batches of tree requests, as hypothesis draws them and as tensors."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from outdraft.attention.base import AttentionForm, AttentionMetadata, LayerCache
from outdraft.core.draft import MAX_DRAFTS
from tests.reference.draft_trees import ancestor_masks, tree_depths


@dataclass(frozen=True)
class Shape:
    """What one request brings to a call.

    `drafts` are the drafted tokens that are rows of it, None: all. Keys of other drafted tokens
    are there if a row sees them.
    """

    context_len: int
    num_causal: int
    parents: tuple[int, ...]
    drafts: tuple[int, ...] | None = None

    @property
    def drafted_rows(self) -> tuple[int, ...]:
        return tuple(range(len(self.parents))) if self.drafts is None else self.drafts

    @property
    def num_rows(self) -> int:
        return self.num_causal + len(self.drafted_rows)

    @property
    def first_draft(self) -> int:
        return self.context_len + self.num_causal

    @property
    def seq_len(self) -> int:
        """Cache indices that the text and the whole draft take."""
        return self.first_draft + len(self.parents)

    def seen_keys(self) -> list[int]:
        """Cache indices that any row sees, in order."""
        masks = ancestor_masks(self.parents)
        union = 0
        for draft in self.drafted_rows:
            union |= masks[draft]
        drafts = [j for j in range(len(self.parents)) if union >> j & 1]
        return [*range(self.first_draft), *(self.first_draft + j for j in drafts)]


@dataclass(frozen=True)
class Model:
    """Sizes of one attention layer; values have head_size numbers unless told otherwise."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    own_value_size: int | None = None

    @property
    def value_size(self) -> int:
        return self.own_value_size or self.head_size


def trees(max_drafts: int = MAX_DRAFTS) -> st.SearchStrategy[tuple[int, ...]]:
    """Parents of random trees, chains and empty drafts among them."""
    sizes = st.integers(0, max_drafts)
    chains = sizes.map(lambda size: tuple(range(size)))
    bushes = sizes.flatmap(lambda size: st.tuples(*[st.integers(0, row) for row in range(size)]))
    return st.one_of(chains, bushes)


@st.composite
def shapes(
    draw: st.DrawFn, max_context: int = 150, max_causal: int = 40, max_drafts: int = MAX_DRAFTS
) -> Shape:
    """Whole trees, or some rows of one in any order; without causal rows there are drafted ones."""
    context_len, parents = draw(st.integers(0, max_context)), draw(trees(max_drafts))
    if not parents or draw(st.booleans()):
        return Shape(context_len, draw(st.integers(1, max_causal)), parents)
    drafts = st.lists(st.integers(0, len(parents) - 1), min_size=1, unique=True)
    num_causal = draw(st.one_of(st.just(0), st.integers(1, max_causal)))
    return Shape(context_len, num_causal, parents, tuple(draw(drafts)))


def models() -> st.SearchStrategy[Model]:
    heads = st.sampled_from([(1, 1), (4, 1), (6, 2), (8, 4), (3, 3)])
    return st.builds(
        lambda heads, *sizes: Model(*heads, *sizes),
        heads,
        st.sampled_from([4, 8, 16, 20, 64, 80, 192]),
        st.sampled_from([1, 4, 16]),
        st.none() | st.sampled_from([4, 12, 64, 128]),
    )


@st.composite
def layers(
    draw: st.DrawFn, longest: int = 40, of: st.SearchStrategy[Model] | None = None
) -> tuple[Model, AttentionForm]:
    """Sizes of a layer, and a form with any of what there is. Windows and chunks are up to
    `longest`; caps bend much or little."""
    model, limits = draw(models() if of is None else of), st.none() | st.integers(1, longest)
    form = AttentionForm(
        model.head_size**-0.5,
        window=draw(limits),
        chunk=draw(limits),
        soft_cap=draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
        sinks_H=sinks(model, draw(st.integers(0, 9))) if draw(st.booleans()) else None,
    )
    return model, form


def sinks(model: Model, seed: int) -> Tensor:
    """Below and above usual scores."""
    return 4 * torch.randn(model.num_heads, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Batch:
    """A step: the queries, keys and values of all tokens, and where they stand."""

    q_THC: Tensor
    cache: LayerCache
    metadata: AttentionMetadata
    k_by_request: list[Tensor]  # [seq_len, G, C] each, in cache order
    v_by_request: list[Tensor]  # [seq_len, G, E]


def build_metadata(requests: list[Shape], block_size: int, seed: int) -> AttentionMetadata:
    """Blocks are dealt out in random order, block 0 among them; the table is wider than needed."""
    rng = torch.Generator().manual_seed(seed)
    needed = [-(-shape.seq_len // block_size) for shape in requests]
    blocks = torch.randperm(sum(needed) + 2, generator=rng).int()
    table_BP = torch.zeros(len(requests), max(needed) + 1, dtype=torch.int32)
    starts, slots, ancestors, positions = [0], [], [], []
    for b, shape in enumerate(requests):
        table_BP[b, : needed[b]] = blocks[sum(needed[:b]) : sum(needed[: b + 1])]
        drafts = list(shape.drafted_rows)
        keys = [*range(shape.context_len, shape.first_draft)]
        keys = torch.tensor([*keys, *(shape.first_draft + j for j in drafts)])
        slots.append(table_BP[b, keys // block_size] * block_size + keys % block_size)
        masks, depths = ancestor_masks(shape.parents), tree_depths(shape.parents)
        ancestors += [0] * shape.num_causal + [masks[j] for j in drafts]
        positions += range(shape.context_len, shape.first_draft)
        positions += [shape.first_draft - 1 + depths[j] for j in drafts]
        starts.append(starts[-1] + shape.num_rows)
    return AttentionMetadata(
        query_start_B1=torch.tensor(starts, dtype=torch.int32),
        context_lens_B=torch.tensor([s.context_len for s in requests], dtype=torch.int32),
        num_causal_B=torch.tensor([s.num_causal for s in requests], dtype=torch.int32),
        ancestors_T=torch.tensor(ancestors, dtype=torch.int64),
        positions_T=torch.tensor(positions, dtype=torch.int64),
        slots_T=torch.cat(slots).long(),
        block_table_BP=table_BP,
        max_rows=max(s.num_rows for s in requests),
        max_seq_len=max(s.seen_keys()[-1] + 1 for s in requests),
    )


def build_batch(
    requests: list[Shape], model: Model, dtype: torch.dtype, seed: int, unused: float = torch.nan
) -> Batch:
    """Random values; what no row sees in the cache is `unused`, so reading it shows."""
    metadata = build_metadata(requests, model.block_size, seed)
    rng = torch.Generator().manual_seed(seed)
    num_blocks = sum(-(-s.seq_len // model.block_size) for s in requests) + 2
    shape = (num_blocks, model.block_size, model.num_kv_heads)
    cache = LayerCache(
        torch.full((*shape, model.head_size), unused, dtype=dtype),
        torch.full((*shape, model.value_size), unused, dtype=dtype),
    )
    keys, values = [], []
    for b, request in enumerate(requests):
        shape = (request.seq_len, model.num_kv_heads)
        for numbers, size in ((keys, model.head_size), (values, model.value_size)):
            drawn = torch.randn((*shape, size), generator=rng, dtype=torch.float64)
            numbers.append(drawn.to(dtype))
        seen = torch.tensor(request.seen_keys())
        places = metadata.block_table_BP[b, seen // model.block_size], seen % model.block_size
        cache.k_PSGC[places] = keys[b][seen]
        cache.v_PSGE[places] = values[b][seen]
    num_rows = sum(request.num_rows for request in requests)
    size = (num_rows, model.num_heads, model.head_size)
    q_THC = torch.randn(size, generator=rng, dtype=torch.float64).to(dtype)
    return Batch(q_THC, cache, metadata, keys, values)


def converted(cache: LayerCache, dtype: torch.dtype) -> LayerCache:
    """The same numbers in another dtype."""
    return LayerCache(cache.k_PSGC.to(dtype), cache.v_PSGE.to(dtype))


def on(metadata: AttentionMetadata, device: str) -> AttentionMetadata:
    """The batch on a device."""
    names = ("query_start_B1", "context_lens_B", "num_causal_B", "ancestors_T")
    names = (*names, "positions_T", "slots_T", "block_table_BP")
    moved = {name: getattr(metadata, name).to(device) for name in names}
    return AttentionMetadata(**moved, max_rows=metadata.max_rows, max_seq_len=metadata.max_seq_len)
