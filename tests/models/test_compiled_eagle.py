"""One compiled call of an EAGLE drafter computes what its layers compute, in every layout."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span, lay_out, send
from outdraft.kernels.reference.table import reference_kernels
from outdraft.kv.cache import KVCache
from outdraft.models.compiled_forward import MAX_ROWS
from outdraft.models.eagle import EagleNetwork
from outdraft.models.eagle_loader import load_eagle
from tests.kernels.tables import cpu_kernels
from tests.models.eagle_checkpoints import LAYOUTS, VOCABULARY, random_target

TABLES = ((3, 1, 7, 5), (2, 8, 0))
CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


@pytest.fixture(scope="module", params=sorted(LAYOUTS))
def network(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> EagleNetwork:
    """Its target is packed, in float32, with weights that bfloat16 holds exactly."""
    kernels = cpu_kernels()
    target = random_target(kernels, torch.float32)
    target.pack()
    path: Path = LAYOUTS[request.param].save(tmp_path_factory.mktemp("checkpoint"))
    return load_eagle(path, target, torch.float32, "cpu", kernels)


def new_cache(network: EagleNetwork) -> KVCache:
    sizes = (network.num_kv_heads, network.head_size, torch.float32, CPU)
    return KVCache(network.num_layers, 12, 4, *sizes)


def batch_of(spans: list[Span]) -> AttentionMetadata:
    return send(lay_out(spans, 4, reference_kernels()), [], CPU)[0]


def random_rows(network: EagleNetwork, num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(0, VOCABULARY, (num_rows,), generator=generator)
    return ids_T, torch.randn(num_rows, network.feature_size, generator=generator)


def test_it_agrees_with_the_layers(network: EagleNetwork):
    """Two requests: prompt chunks, then a chunk with a drafted tree and one with a chain."""
    first, second = TABLES
    steps = [
        [Span(0, 9, (), first), Span(0, 2, (), second)],
        [Span(9, 2, (0, 0, 1, 3), first), Span(2, 3, (0, 1), second)],
    ]
    caches = [new_cache(network), new_cache(network)]
    for seed, spans in enumerate(steps):
        ids_T, states_TF = random_rows(network, sum(span.num_rows for span in spans), seed)
        fast, slow = (
            run(ids_T, states_TF, cache.layers, batch_of(spans))
            for run, cache in zip((network, network.forward_by_layers), caches, strict=True)
        )
        torch.testing.assert_close(fast, slow, **CLOSE)
    for mine, other in zip(*(cache.layers for cache in caches), strict=True):
        torch.testing.assert_close(mine.k_PSGC, other.k_PSGC, **CLOSE)
        torch.testing.assert_close(mine.v_PSGC, other.v_PSGC, **CLOSE)


def test_a_text_that_is_too_long_for_one_call_goes_by_layers(network: EagleNetwork):
    attention_span = Span(0, MAX_ROWS + 1, (), tuple(range(17)))
    sizes = (network.num_kv_heads, network.head_size, torch.float32, CPU)
    caches = [KVCache(network.num_layers, 17, 4, *sizes) for _ in range(2)]
    ids_T, states_TF = random_rows(network, MAX_ROWS + 1, 6)

    whole_TD = network(ids_T, states_TF, caches[0].layers, batch_of([attention_span]))

    first = batch_of([Span(0, MAX_ROWS, (), attention_span.block_ids)])
    last = batch_of([Span(MAX_ROWS, 1, (), attention_span.block_ids)])
    network(ids_T[:-1], states_TF[:-1], caches[1].layers, first)
    last_TD = network(ids_T[-1:], states_TF[-1:], caches[1].layers, last)
    torch.testing.assert_close(whole_TD[-1:], last_TD, **CLOSE)
