"""A warm-up leaves an engine as it found it."""

import mmap
import sys

import pytest

from outdraft.core.errors import ConfigError
from outdraft.engine.build import check_longest_text, warm_up
from outdraft.engine.llm import LLM
from tests.oracle.engines import config, engine, greedy, ids, prompts_of, run, speculation
from tests.ranks import Spread, spread_models
from tests.resident import resident_bytes


@pytest.mark.parametrize("method", ["plain", "combined"])
def test_nothing_is_left_and_nothing_changes(method: str):
    fresh, warm = engine("qwen2", method), engine("qwen2", method)
    warm_up(warm.engine)
    warm.engine.check_invariants()
    assert not warm.engine.has_work
    pool = warm.engine.scheduler.pool
    assert pool.num_free == pool.num_blocks
    prompts = prompts_of((5, 9))
    assert ids(run(warm, prompts, greedy(12))) == ids(run(fresh, prompts, greedy(12)))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="tells no pages")
@pytest.mark.parametrize("method", ["plain", "draft_model"])
def test_of_the_cache_only_the_blocks_of_its_texts_are_touched(method: str):
    llm = engine("qwen2", method, num_blocks=20_000, block_size=16)
    layers = llm.engine.runner.cache.layers
    cached = [one for layer in layers for one in (layer.k_PSGC, layer.v_PSGE)]
    warm_up(llm.engine)
    pages = 2 * len(cached) * mmap.PAGESIZE
    assert 0 < resident_bytes(cached) <= 2 * sum(one[0].nbytes for one in cached) + pages
    assert sum(one.nbytes for one in cached) > 100 * pages


def test_a_very_short_context_is_enough():
    warm_up(engine("qwen2", "combined", max_model_len=2).engine)


def test_a_server_needs_a_cache_for_its_longest_text():
    fitting = engine("qwen2", "plain", max_model_len=32, block_size=8, num_blocks=4)
    check_longest_text(fitting.engine, fitting.memory)
    warm_up(fitting.engine)
    small = engine("qwen2", "plain", max_model_len=33, block_size=8, num_blocks=4)
    with pytest.raises(ConfigError, match=r"max_model_len=33 tokens .* holds 32: lower"):
        check_longest_text(small.engine, small.memory)


def test_every_draft_group_is_warmed_up():
    """They would be other ranks: here it counts who owns what the steps draft for."""
    chosen = config("qwen2", speculation("qwen2", "draft_model", 3))
    models = spread_models(chosen, 2, 1)
    llm = LLM.from_config(chosen, models[0])
    owners: set[int] = set()
    with Spread(llm, models) as ranks:
        commit = llm.engine.scheduler.commit

        def noted(step, result):
            owners.update(work.owner for work in step.works if work.drafts is not None)
            return commit(step, result)

        llm.engine.scheduler.commit = noted
        warm_up(llm.engine)
        assert len(ranks.runners) == 2
    assert owners == {0, 1}
    llm.engine.check_invariants()
    assert not llm.engine.has_work
