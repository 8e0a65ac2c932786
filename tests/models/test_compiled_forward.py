"""One compiled call computes what the layers compute, for every family."""

import dataclasses
from pathlib import Path

import pytest
import torch

from outdraft.attention.rows import Span, lay_out, send
from outdraft.kernels.reference.table import reference_kernels
from outdraft.kv.cache import KVCache
from outdraft.models.layers.linear import are_bfloat16
from outdraft.models.llama import CausalLM
from outdraft.models.loader import load_model
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import TINY, VARIANTS, randomised, save


@pytest.fixture(scope="module", params=VARIANTS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CausalLM:
    """Loaded in float32 from weights that bfloat16 holds exactly."""
    path: Path = tmp_path_factory.mktemp("checkpoint")
    save(randomised(VARIANTS[request.param]()).bfloat16(), path)
    return load_model(path, torch.float32, "cpu", cpu_kernels(1))


def hidden_of(model: CausalLM, compiled: bool) -> tuple[torch.Tensor, KVCache]:
    """Two requests: prompt chunks, then a chunk with a drafted tree and one with a chain."""
    config = model.config
    cache = KVCache(
        config.num_layers,
        12,
        4,
        config.num_kv_heads,
        config.head_size,
        torch.float32,
        torch.device("cpu"),
    )
    generator = torch.Generator().manual_seed(3)
    hidden = []
    for spans in (
        [Span(0, 9, (), (3, 1, 7, 5)), Span(0, 2, (), (2, 8, 0))],
        [Span(9, 2, (0, 0, 1, 3), (3, 1, 7, 5)), Span(2, 3, (0, 1), (2, 8, 0))],
    ):
        metadata, _ = send(lay_out(spans, 4, reference_kernels()), [], torch.device("cpu"))
        num_rows = sum(span.num_rows for span in spans)
        ids_T = torch.randint(0, TINY["vocab_size"], (num_rows,), generator=generator)
        run = model.forward_tapped if compiled else model.forward_by_layers
        with torch.inference_mode():
            states, tapped = run(ids_T, metadata.positions_T, cache.layers, metadata, (2, 0, 1))
        hidden.append(torch.cat([states[None], tapped]))
    return torch.cat(hidden, dim=1), cache


def test_it_agrees_with_the_layers(model: CausalLM):
    assert are_bfloat16(model)
    fast, fast_cache = hidden_of(model, compiled=True)
    slow, slow_cache = hidden_of(model, compiled=False)
    torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-5)
    for mine, other in zip(fast_cache.layers, slow_cache.layers, strict=True):
        torch.testing.assert_close(mine.k_PSGC, other.k_PSGC, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.v_PSGC, other.v_PSGC, rtol=1e-4, atol=1e-5)


def test_the_best_tokens_are_the_argmax_of_the_logits(model: CausalLM):
    hidden_RD = torch.randn(3, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        for rows_RD in (hidden_RD, hidden_RD[1:2], hidden_RD[[2, 0]], hidden_RD[::2]):
            best_R, _ = model.checked_best_tokens(rows_RD)
            assert torch.equal(best_R, model.logits(rows_RD).argmax(1))
            assert best_R.dtype == torch.int64


@pytest.mark.parametrize(("num_threads", "is_compiled"), [(1, True), (2, False)])
def test_long_texts_go_by_layers_where_these_have_threads(
    num_threads: int, is_compiled: bool, tmp_path: Path
):
    save(randomised(VARIANTS[next(iter(VARIANTS))]()).bfloat16(), tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        model = load_model(tmp_path, torch.float32, "cpu", cpu_kernels(num_threads))
    finally:
        torch.set_num_threads(before)
    short, _ = send(
        lay_out([Span(5, 1, (), (3, 1, 7))], 4, reference_kernels()), [], torch.device("cpu")
    )
    long = dataclasses.replace(short, max_seq_len=100_000)
    assert model._compiled is not None
    assert model._compiled.suits([short, short])
    assert model._compiled.suits([short, long]) == is_compiled
