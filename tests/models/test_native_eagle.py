"""The compiled library computes what the layers of an EAGLE drafter compute, in every layout."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outdraft.attention.base import AttentionMetadata
from outdraft.attention.rows import Span
from outdraft.kernels.torch.table import reference_kernels
from outdraft.kv.cache import KVCache
from outdraft.models.drafters.eagle import EagleNetwork, load_eagle
from outdraft.models.drafters.tables import TargetTables
from tests.kernels.tables import cpu_kernels
from tests.models.eagle_checkpoints import LAYOUTS, VOCABULARY, random_target
from tests.row_batches import row_batch

TABLES = ((3, 1, 7, 5), (2, 8, 0))
CPU = torch.device("cpu")
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def networks(path: Path, layout: str) -> list[EagleNetwork]:
    """By the compiled library and by the layers, with weights that bfloat16 holds exactly."""
    found: list[EagleNetwork] = []
    for kernels in (cpu_kernels(), reference_kernels()):
        target = random_target(kernels, torch.float32)
        checkpoint = LAYOUTS[layout].save(path)
        found.append(load_eagle(checkpoint, TargetTables(target)))
    return found


def new_cache(network: EagleNetwork) -> KVCache:
    return KVCache(network.shard.cache_shapes, 12, 4, torch.float32, CPU)


def batch_of(spans: list[Span]) -> AttentionMetadata:
    return row_batch(spans, 4)


def random_rows(network: EagleNetwork, num_rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids_T = torch.randint(0, VOCABULARY, (num_rows,), generator=generator)
    return ids_T, torch.randn(num_rows, network.feature_size, generator=generator)


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_it_agrees_with_the_layers(layout: str, tmp_path: Path):
    """Two requests: prompt chunks, then a chunk with a drafted tree and one with a chain."""
    first, second = TABLES
    steps = [
        [Span(0, 9, (), first), Span(0, 2, (), second)],
        [Span(9, 2, (0, 0, 1, 3), first), Span(2, 3, (0, 1), second)],
    ]
    found: list[list[Tensor]] = []
    for network in networks(tmp_path, layout):
        cache, results = new_cache(network), list[Tensor]()
        for seed, spans in enumerate(steps):
            ids_T, states_TF = random_rows(network, sum(span.num_rows for span in spans), seed)
            with torch.inference_mode():
                states_TD = network(ids_T, states_TF, cache.layers, batch_of(spans))
                results += [states_TD, network.logits(states_TD)]
        keys = (x for layer in cache.layers for x in (layer.k_PSGC, layer.v_PSGE))
        found.append([*results, *keys])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **CLOSE)
