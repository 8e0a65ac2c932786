"""Steps and traces tell what a real engine decided and did."""

from collections import Counter

import pytest

from outdraft.control.controller import Controller
from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.core.plan import StepStats
from outdraft.core.sampling import SamplingParams, SpeculationParams
from tests.oracle.engines import engine, prompts_of, run

FAMILY = "qwen2"
LENGTHS = (5, 30, 17)
CHEAP = CostTable(
    CostCurve((1, 64), (1.0, 1.1)),
    context_s=0.0,
    request_s=0.0,
    drafters={
        "draft_model": DrafterCost(CostCurve((1, 8), (0.01, 0.01)), CostCurve((1,), (0.0,)), 0.0)
    },
    host_s=0.0,
    host_request_s=0.0,
)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "medusa-tree"])
def test_a_trace_and_the_numbers_of_the_step_agree(method: str):
    llm, steps = engine(FAMILY, method), list[StepStats]()
    if method == "draft_model":
        llm.engine.drafting.control = Controller(CHEAP, max_levels=3)
    llm.engine.on_step = steps.append
    params = SamplingParams(
        temperature=0.7,
        seed=3,
        max_tokens=24,
        ignore_eos=True,
        speculation=SpeculationParams(trace=True),
    )
    outputs = run(llm, prompts_of(LENGTHS), params)
    traced = [step for output in outputs for step in output.outputs[0].trace or ()]

    drafted = Counter(length for step in steps for length in step.draft_lengths)
    granted = Counter(length for step in steps for length in step.granted_lengths)
    assert Counter(len(step.drafted_ids) for step in traced) == drafted
    assert Counter(step.granted for step in traced) == granted
    assert max(granted) > 0
    levels = [level for step in steps for level in step.draft_levels]
    accepted = [len(step.accepted_rows) for step in traced if step.drafted_ids]
    assert sorted(kept for _, _, kept in levels) == sorted(accepted)
    assert all(kept <= level for _, level, kept in levels)
    decisions = {step.decision for step in steps}
    assert {step.decision for step in traced} <= decisions
    for step in steps:
        if step.decision is not None and step.decision.is_predicted:
            assert method == "draft_model"
            assert step.decision.step_s > 0
    if method == "draft_model":
        assert any(one is not None and one.price is not None for one in decisions)
