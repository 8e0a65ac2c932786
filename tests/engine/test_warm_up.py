"""A warm-up leaves an engine as it found it."""

import pytest

from outdraft.engine.build import warm_up
from tests.oracle.engines import engine, greedy, ids, prompts_of, run


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


def test_a_very_short_context_is_enough():
    warm_up(engine("qwen2", "combined", max_model_len=2).engine)
