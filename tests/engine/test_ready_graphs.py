"""The steps that make a GPU's graphs at the start, run by engines whose kernels make none."""

import pytest

from outdraft.core.plan import StepPlan
from outdraft.core.sampling import SamplingParams
from outdraft.engine import build
from outdraft.engine.build import MOST_DRAFTS, make_graphs
from outdraft.engine.llm import LLM
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
    "method", ["plain", "ngram", "draft_model", "draft_model-tree", "eagle3", "medusa", "dflash"]
)
def test_an_engine_is_as_it_was(method: str):
    """The reference says of every index whether it is one."""
    fresh, ready = (engine("qwen2", method, kernels="reference") for _ in range(2))
    assert planned(ready)
    ready.engine.check_invariants()
    prompts, drawn = prompts_of((5, 9)), SamplingParams(max_tokens=12, ignore_eos=True)
    for params in (greedy(12), drawn):
        assert ids(run(ready, prompts, params)) == ids(run(fresh, prompts, params))
    assert ready.engine.stats.num_steps == fresh.engine.stats.num_steps
    assert ready.engine.stats.num_accepted_tokens == fresh.engine.stats.num_accepted_tokens


@pytest.mark.parametrize(("max_num_seqs", "most_requests"), [(40, 32), (6, 6), (1, 1)])
def test_there_are_steps_for_every_number_of_requests_and_drafts(
    max_num_seqs: int, most_requests: int
):
    """A batch with short texts finds the graphs of its drafts and of the target's passes, whatever
    each request drafts."""
    llm = engine(
        "qwen2",
        "draft_model",
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=512,
        num_blocks=512,
    )
    most = min(MOST_DRAFTS, llm.config.speculation.max_drafts)
    grown, some, passes = set(), set(), set()
    for plan in planned(llm):
        works = plan.works
        drafts = max(work.num_model_drafts for work in works)
        grown.add((rounded_rows(len(works)), drafts))
        if not all(work.num_model_drafts for work in works):
            some.add((rounded_rows(len(works)), drafts))
        passes.add((rounded_requests(len(works)), rounded_rows(plan.num_rows)))
    for requests in range(1, most_requests + 1):
        assert {(rounded_rows(requests), drafts) for drafts in range(most + 1)} <= grown
        if requests > 1:
            assert {(rounded_rows(requests), drafts) for drafts in range(1, most + 1)} <= some
        rows = range(requests, requests * (1 + most) + 1)
        assert {(rounded_requests(requests), rounded_rows(number)) for number in rows} <= passes


def test_a_network_that_reads_states_reads_what_was_accepted():
    llm = engine("qwen2", "eagle3")
    network = {
        work.num_tokens - work.num_drafter_computed
        for plan in planned(llm)
        for work in plan.works
        if work.num_model_drafts
    }
    assert set(range(2, 3 + llm.config.speculation.max_drafts)) <= network


def test_an_engine_without_drafters_drafts_nothing():
    assert all(
        work.num_drafts == 0 for plan in planned(engine("qwen2", "plain")) for work in plan.works
    )


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
    monkeypatch.setattr(build, "MOST_S", 0.0)
    assert not planned(engine("qwen2", "plain"))
