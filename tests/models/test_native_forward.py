"""The compiled library computes what the layers compute, for every family."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from outdraft.attention.rows import Span
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels
from outdraft.kv.cache import KVCache
from outdraft.models.decoder.loader import load_model
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import TINY, VARIANTS, randomised, save
from tests.row_batches import row_batch

CPU = torch.device("cpu")


def states_and_keys(path: Path, kernels: Kernels) -> list[Tensor]:
    """Two requests: prompt chunks, then a chunk with a drafted tree and one with a chain."""
    model = load_model(path, torch.float32, "cpu", kernels)
    cache = KVCache(model.config.cache_shapes, 12, 4, torch.float32, CPU)
    generator = torch.Generator().manual_seed(3)
    found: list[Tensor] = []
    for spans in (
        [Span(0, 9, (), (3, 1, 7, 5)), Span(0, 2, (), (2, 8, 0))],
        [Span(9, 2, (0, 0, 1, 3), (3, 1, 7, 5)), Span(2, 3, (0, 1), (2, 8, 0))],
    ):
        metadata = row_batch(spans, 4)
        num_rows = sum(span.num_rows for span in spans)
        ids_T = torch.randint(0, TINY["vocab_size"], (num_rows,), generator=generator)
        with torch.inference_mode():
            states_TD, tapped_TKD = model.forward_tapped(ids_T, cache.layers, metadata, (2, 0, 1))
            found += [states_TD, tapped_TKD, model.logits(states_TD)]
    return [*found, *(x for layer in cache.layers for x in (layer.k_PSGC, layer.v_PSGE))]


def assert_layers_are_computed(path: Path) -> None:
    native, layers = (states_and_keys(path, one) for one in (cpu_kernels(), reference_kernels()))
    for got, want in zip(native, layers, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", VARIANTS)
@pytest.mark.parametrize("fits_bfloat16", [True, False])
def test_it_agrees_with_the_layers(family: str, fits_bfloat16: bool, tmp_path: Path):
    theirs = randomised(VARIANTS[family]())
    assert_layers_are_computed(save(theirs.bfloat16() if fits_bfloat16 else theirs, tmp_path))
