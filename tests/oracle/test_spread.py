"""Targets spread over ranks, with drafters over fewer: the ids of one rank."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from outdraft.engine.llm import LLM
from outdraft.engine.loading import LoadedModels
from tests.oracle.engines import METHODS, config, engine, ids, prompts_of, run, speculation
from tests.oracle.test_plans_are_data import params_of_every_kind
from tests.ranks import Spread, spread_models

FAMILY = "qwen2"
SMALL: dict[str, Any] = {
    "block_size": 4,
    "num_blocks": 18,
    "dtype": "float64",
}  # too small for four at once
SIZES = [(2, 1), (2, 2)]


@cache
def models(method: str, size: int, draft_size: int) -> list[LoadedModels]:
    return spread_models(config(FAMILY, speculation(FAMILY, method, 3), **SMALL), size, draft_size)


def spread(method: str, size: int, draft_size: int, **options: Any) -> tuple[LLM, Spread]:
    """An engine over ranks."""
    chosen = config(FAMILY, speculation(FAMILY, method, 3), **SMALL | options)
    loaded = models(method, size, draft_size)
    llm = LLM.from_config(chosen, loaded[0])
    return llm, Spread(llm, loaded)


@pytest.mark.parametrize(("size", "draft_size"), SIZES)
@pytest.mark.parametrize("method", METHODS)
def test_ids_are_those_of_one_rank(method: str, size: int, draft_size: int) -> None:
    """Greedy and seeded, with penalties, log-probabilities and preemption."""
    prompts = prompts_of([3, 21, 17, 9, 30, 8, 12, 5])
    params = [replace(one, seed=number) for number, one in enumerate(params_of_every_kind())]
    want = run(engine(FAMILY, method, **SMALL), prompts, params)
    llm, ranks = spread(method, size, draft_size)
    got = run(llm, prompts, params)
    ranks.end()
    assert ids(got) == ids(want)
    texts_SL = llm.engine.runner.state.token_ids_SL
    for runner in ranks.runners[1:]:
        assert (runner.state.token_ids_SL == texts_SL)[:, :-1].all()
