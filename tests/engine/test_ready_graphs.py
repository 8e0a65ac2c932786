"""The steps that make a GPU's graphs at the start, run by engines whose kernels make none."""

import pytest

from outdraft.core.plan import StepPlan
from outdraft.engine import ready_graphs
from outdraft.engine.llm import LLM
from outdraft.engine.ready_graphs import MOST_DRAFTS, make_graphs
from outdraft.kernels.data.graph_sizes import rounded_requests, rounded_rows
from tests.oracle.engines import engine, greedy, ids, prompts_of, run


def planned(llm: LLM) -> list[StepPlan]:
    """The plans of all steps that make graphs."""
    runner, plans = llm.engine.runner, list[StepPlan]()
    launch = runner.launch
    runner.launch = lambda plan: plans.append(plan) or launch(plan)
    make_graphs(llm.config, runner)
    runner.launch = launch
    return plans


@pytest.mark.parametrize(
    "method", ["plain", "ngram", "draft_model", "draft_model-tree", "eagle3", "medusa"]
)
def test_an_engine_is_as_it_was(method: str):
    fresh, ready = engine("qwen2", method), engine("qwen2", method)
    assert planned(ready)
    ready.engine.check_invariants()
    prompts = prompts_of((5, 9))
    assert ids(run(ready, prompts, greedy(12))) == ids(run(fresh, prompts, greedy(12)))


def test_there_are_steps_for_every_number_of_requests_and_drafts():
    """A batch of at most 32 requests with short texts finds all its graphs, whatever each of them
    drafts, and whatever its network has still to read."""
    llm = engine(
        "qwen2", "draft_model", max_num_seqs=40, max_num_batched_tokens=512, num_blocks=512
    )
    most = min(MOST_DRAFTS, llm.config.speculation.max_drafts)
    grown, some, passes, read = set(), set(), set(), set()
    for plan in planned(llm):
        works = plan.works
        drafts = max(work.num_model_drafts for work in works)
        grown.add((rounded_rows(len(works)), drafts))
        if not all(work.num_model_drafts for work in works):
            some.add((rounded_rows(len(works)), drafts))
        passes.add((rounded_requests(len(works)), rounded_rows(plan.num_rows)))
        if drafts:
            unread = sum(work.num_tokens - work.num_drafter_computed for work in works)
            read.add((rounded_requests(len(works)), rounded_rows(unread)))
    for requests in range(1, 33):
        assert {(rounded_rows(requests), drafts) for drafts in range(most + 1)} <= grown
        if requests > 1:
            assert {(rounded_rows(requests), drafts) for drafts in range(1, most + 1)} <= some
        rows = range(requests, requests * (1 + most) + 1)
        assert {(rounded_requests(requests), rounded_rows(number)) for number in rows} <= passes
        rows = range(requests, 2 * requests + 1)
        assert {(rounded_requests(requests), rounded_rows(number)) for number in rows} <= read


def test_a_network_that_is_watched_drafts_in_both_ways():
    """An engine that chooses lengths asks for margins now and then."""
    for control in ("fixed", "adaptive"):
        llm = engine("qwen2", "draft_model", control=control)
        grown: dict[tuple[int, int], set[bool]] = {}
        for plan in planned(llm):
            works = [work for work in plan.works if work.num_model_drafts]
            if works:
                drafts = max(work.num_model_drafts for work in works)
                told = any(work.drafts is not None and work.drafts.stop for work in works)
                grown.setdefault((rounded_rows(len(works)), drafts), set()).add(told)
        assert grown
        for told in grown.values():
            assert told == ({False} if control == "fixed" else {False, True})


def test_time_for_graphs_ends(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ready_graphs, "MOST_S", 0.0)
    assert not planned(engine("qwen2", "plain"))
