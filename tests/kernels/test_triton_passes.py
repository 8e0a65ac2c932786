"""A decoder's passes on a GPU: as graphs, and launch by launch; noise with the reference's bits.

Without a GPU the kernels are interpreted, and what stands for a graph repeats the launches.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from outdraft.attention.rows import Span
from outdraft.kernels import choose
from outdraft.kernels.data.noise import NoiseKeys
from outdraft.kernels.ops import Kernels, WarmUps
from outdraft.kernels.torch import noise
from outdraft.kernels.torch.table import reference_kernels
from outdraft.kv.cache import KVCache
from tests.attention.ragged import on
from tests.kernels.decoders import (
    Sizes,
    batch_with_logits,
    blocks_of,
    make_cache,
    make_spec,
    rows_for,
)
from tests.kernels.test_decoder import BOUNDS, KINDS, assert_near
from tests.pairwise import some

pytest.importorskip("triton", reason="needs triton")
from outdraft.kernels.choose import with_triton
from outdraft.kernels.data.graph_sizes import (
    MOST_ROWS,
    TREE_ROWS,
    rounded_grown_len,
    rounded_len,
    rounded_requests,
    rounded_rows,
)
from outdraft.kernels.triton.decoder import TritonDecoder
from outdraft.kernels.triton.graphed import GraphedPasses

EVERY = [(kind, has_graphs) for kind in KINDS for has_graphs in (False, True)]
# The interpreter takes up to a minute where rows are rounded up for graphs.
GRAPHED = ("fused",)
CASES = [
    *some(
        [("cpu", *case) for case in EVERY],
        [("cpu", *case) for case in EVERY if not case[1] or case[0] in GRAPHED],
    ),
    *(pytest.param("cuda", *case, marks=pytest.mark.gpu) for case in EVERY),
]
# The least of decoders, for tests of graphs alone.
SMALL = Sizes(hidden=16, intermediate=24, heads=(1, 1), windows=(None,))
# Prompts of three requests, and what is read behind them in the steps that follow.
TREE, CHAIN = (0, 0, 1, 1, 2, 4), (0, 1, 2)
STEPS = (
    [(0, 5, ()), (0, 30, ()), (0, 7, ())],
    [(5, 1, ()), (30, 1, ()), (7, 1, ())],
    [(6, 1, CHAIN), (31, 1, TREE), (8, 1, ())],
    [(7, 1, TREE), (32, 1, ()), (9, 1, CHAIN)],
    [(8, 1, ()), (33, 1, ())],
    [(9, 1, ()), (34, 1, ())],
    [(10, 2, (0,)), (35, 1, CHAIN), (10, 1, ())],
)
# The steps that are the first with so few rows, or more, with taps or without.
FIRST = {0, 1, 2}
# Numbers of rows and requests of the others, once they are rounded up.
NUM_LATER, NUM_SIZES = 3, 5  # and of all of them


def spans_of(step: Sequence[tuple[int, int, tuple[int, ...]]]) -> list[Span]:
    return [
        Span(context, count, parents, blocks_of(request))
        for request, (context, count, parents) in enumerate(step)
    ]


def read_steps(decoder: object, sizes: Sizes, dtype: torch.dtype, cache: KVCache) -> list[Tensor]:
    """What the passes of all steps return, on the host, and the cache behind them."""
    device, found = cache.layers[0].k_PSGC.device, list[Tensor]()
    for number, step in enumerate(STEPS):
        metadata, wanted_R = batch_with_logits(spans_of(step))
        ids_T, states_TD = rows_for(len(metadata.slots_T), sizes.hidden, dtype, number)
        entry = states_TD.to(device) if sizes.entry else None
        taps = () if number in (1, 4, 5) else (0, len(sizes.windows))
        rows = (on(metadata, str(device)), taps, entry, wanted_R.to(device))
        found += decoder(ids_T.to(device), cache.layers, *rows)
        found += [decoder.logits(found[-2]), *decoder.best_tokens(found[-2])]
    return [tensor.cpu() for tensor in found] + [
        numbers.cpu() for layer in cache.layers for numbers in (layer.k_PSGC, layer.v_PSGE)
    ]


class Repeats:
    """Instead of graphs: the launches again. It counts what it made and what was repeated."""

    def __init__(self) -> None:
        self.num_made = self.num_repeated = 0

    def __call__(self, launch: Callable[[], tuple[Tensor, Tensor]]) -> tuple[object, object]:
        self.num_made += 1
        results = tuple(tensor.fill_(float("nan")) for tensor in launch())

        def repeat() -> None:
            self.num_repeated += 1
            for kept, made in zip(results, launch(), strict=True):
                kept.copy_(made)

        return repeat, results


def graphed(spec: object, capture: object = None) -> TritonDecoder:
    """A decoder with graphs; `capture`: what stands for them."""
    times = WarmUps()
    decoder = TritonDecoder(spec, has_graphs=True, warm_ups=times)
    if capture is not None:
        few_rows = graphs_of(decoder)._few_rows
        decoder._graphs = GraphedPasses(decoder._all_rows, few_rows, times, lambda: capture)
    return decoder


def graphs_of(decoder: TritonDecoder) -> GraphedPasses:
    assert decoder._graphs is not None
    return decoder._graphs


@pytest.mark.slow
@pytest.mark.few(4)
@pytest.mark.parametrize(("device", "kind", "has_graphs"), CASES)
@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])
def test_passes_of_all_steps_are_the_references(device, kind, dtype, has_graphs):
    if device == "cpu" and dtype is torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 numbers as if they were integers")
    sizes, place = KINDS[kind], torch.device(device)
    kernels = with_triton(reference_kernels(), has_graphs=has_graphs)
    spec = make_spec(sizes, kernels, dtype, device=place)
    decoder: object = kernels.compile_decoder(spec)
    if device == "cpu" and has_graphs:
        decoder = graphed(spec, Repeats())
    cache = make_cache(sizes, dtype, place)
    found = read_steps(decoder, sizes, dtype, cache)
    exact = reference_kernels()
    want = read_steps(
        exact.compile_decoder(make_spec(sizes, exact, torch.float64)),
        sizes,
        torch.float64,
        make_cache(sizes, torch.float64),
    )
    for got, right in zip(found, want, strict=True):
        if got.dtype.is_floating_point:
            assert_near(got, right, dtype)
    if has_graphs:
        (graphs,) = graphs_of(decoder)._graphs._by_keys.values()
        assert len(graphs._graphs) == NUM_LATER


@pytest.mark.slow
def test_sizes_become_a_graph_when_their_launches_were_made_before():
    repeats, kernels = Repeats(), with_triton(reference_kernels(), has_graphs=False)
    decoder = graphed(make_spec(SMALL, kernels, torch.float32), repeats)
    cache = make_cache(SMALL, torch.float32)
    read_steps(decoder, SMALL, torch.float32, cache)
    assert (repeats.num_made, repeats.num_repeated) == (NUM_LATER, len(STEPS) - len(FIRST))
    read_steps(decoder, SMALL, torch.float32, cache)
    assert repeats.num_made == NUM_SIZES
    assert repeats.num_repeated == 2 * len(STEPS) - len(FIRST)


@pytest.mark.parametrize("asked", [False, True])
def test_the_table_of_a_gpu_says_whether_it_has_graphs(asked):
    kernels = choose.choose_kernels("auto", torch.device("cuda"), torch.bfloat16, has_graphs=asked)
    assert choose.has_graphs(kernels) is asked
    assert not choose.has_graphs(choose.choose_kernels("auto", torch.device("cpu"), torch.bfloat16))


@pytest.mark.slow
def test_each_cache_has_graphs_of_its_own_as_long_as_it_lives():
    num_made = 0

    def capture(launch: Callable[[], tuple[Tensor, Tensor]]) -> tuple[object, object]:
        nonlocal num_made
        num_made += 1
        return (lambda: None), launch()

    kernels = with_triton(reference_kernels(), has_graphs=False)
    decoder = graphed(make_spec(SMALL, kernels, torch.float32), capture)
    first, second = (make_cache(SMALL, torch.float32) for _ in range(2))
    for cache in (first, second, first, second):
        read_steps(decoder, SMALL, torch.float32, cache)
    assert num_made == 2 * NUM_SIZES
    assert len(graphs_of(decoder)._graphs._by_keys) == 2
    del cache, second
    gc.collect()
    assert len(graphs_of(decoder)._graphs._by_keys) == 1


def test_longer_texts_leave_the_graphs_of_shorter_ones():
    kernels = with_triton(reference_kernels(), has_graphs=False)
    repeats = Repeats()
    decoder = graphed(make_spec(SMALL, kernels, torch.float32), repeats)
    cache = make_cache(SMALL, torch.float32)
    ids_T, _ = rows_for(1, SMALL.hidden, torch.float32, 0)
    for length, num_made in ((512, 0), (300, 1), (513, 1), (520, 2), (300, 2), (700, 2)):
        metadata, _ = batch_with_logits([Span(0, 1, (), (0,))])
        decoder(ids_T, cache.layers, replace(metadata, max_seq_len=length))
        assert repeats.num_made == num_made, length


def test_long_passes_are_launched_one_by_one():
    passes = GraphedPasses(lambda *rows: rows, 4, WarmUps(), Repeats)
    assert passes.can_run(MOST_ROWS)
    assert not passes.can_run(MOST_ROWS + 1)


def test_a_long_chunk_of_a_prompt_has_the_kernels_of_long_chunks():
    """What is padded may not count as a request of fewer rows."""
    kernels = with_triton(reference_kernels(), has_graphs=False)
    passes = graphs_of(graphed(make_spec(SMALL, kernels, torch.float32), Repeats()))
    few, *many = [passes.most_rows(n) for n in (3, TREE_ROWS, TREE_ROWS + 1, MOST_ROWS)]
    assert many == [TREE_ROWS, MOST_ROWS, MOST_ROWS]
    assert few < TREE_ROWS


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", BOUNDS, ids=["float32", "bfloat16"])
@pytest.mark.parametrize("beside", [0, 1, 5])
def test_long_chunks_become_graphs_that_are_the_references(dtype, beside):
    """Alone, and beside requests of one row."""
    sizes, place = KINDS["windows"], torch.device("cuda")
    spans = [Span(0, 300, (), tuple(range(38)))]
    spans += [Span(0, 1, (), (40 + number,)) for number in range(beside)]
    metadata, wanted_R = batch_with_logits(spans)
    ids_T, _ = rows_for(300 + beside, sizes.hidden, dtype, 0)

    def read(kernels: Kernels, device: torch.device, dtype: torch.dtype, times: int) -> Tensor:
        decoder = kernels.compile_decoder(make_spec(sizes, kernels, dtype, device=device))
        cache = make_cache(sizes, dtype, device)
        rows = on(metadata, str(device)), (), None, wanted_R.to(device)
        for _ in range(times):  # the second run is a graph
            states_TD, _ = decoder(ids_T.to(device), cache.layers, *rows)
        return states_TD.cpu()

    got = read(with_triton(reference_kernels(), has_graphs=True), place, dtype, 3)
    want = read(reference_kernels(), torch.device("cpu"), torch.float64, 1)
    assert_near(got, want, dtype)


def test_sizes_are_few_and_hold_all_rows():
    sizes = [rounded_rows(number) for number in range(1, MOST_ROWS + 1)]
    assert all(size >= number for number, size in enumerate(sizes, start=1))
    assert sizes[-1] == MOST_ROWS
    assert len(set(sizes)) == 21
    assert all(size < 2 * number for number, size in enumerate(sizes, start=1))
    assert [rounded_requests(number) for number in (1, 2, 4, 5, 16, 17, 256)] == [
        *(1, 4, 4, 16, 16, 64, 256)
    ]
    assert [rounded_len(length) for length in (1, 512, 513, 1025)] == [512, 512, 1024, 2048]
    lengths = [rounded_grown_len(length) for length in (1, 2048, 2049, 8193)]
    assert lengths == [2048, 2048, 8192, 32768]


@pytest.mark.gpu
def test_noise_on_a_gpu_has_the_bits_of_the_reference():
    gumbel = choose.choose_kernels("auto", torch.device("cuda"), torch.bfloat16).gumbel
    assert gumbel.__module__ == "outdraft.kernels.triton.noise"
    columns = torch.randint(0, 2**62, (4, 16), generator=torch.Generator().manual_seed(1))
    for purpose in range(4):
        keys = [columns[0], columns[1], torch.full_like(columns[2], purpose), columns[3] % 2**31]
        on_gpu = NoiseKeys(*(column.cuda() for column in keys))
        assert torch.equal(gumbel(on_gpu, 100_001).cpu(), noise.gumbel(NoiseKeys(*keys), 100_001))
