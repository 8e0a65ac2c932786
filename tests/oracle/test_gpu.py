"""On a GPU: the same ids as on the CPU, and one host synchronisation a step."""

import warnings

import pytest
import torch

from tests.oracle import forms
from tests.oracle.engines import METHODS, engine, greedy, greedy_oracle, ids, prompts_of, run
from tests.oracle.live_rules import LookingRules, RandomRules
from tests.oracle.test_drafter_invariant import sampled

LENGTHS = (3, 21, 40, 9, 33)
pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("method", METHODS)
def test_float32_ids_equal_transformers(method: str):
    llm = engine("qwen3-window", method, device="cuda")
    assert ids(run(llm, prompts_of(LENGTHS), greedy(30))) == greedy_oracle(
        "qwen3-window", LENGTHS, 30
    )


@pytest.mark.parametrize("method", ["ngram", "draft_model", "combined"])
def test_seeded_samples_equal_the_cpus(method: str):
    rule = {"rejection_sample_method": "drafter_invariant"}
    params = sampled(top_k=20, top_p=0.9, presence_penalty=0.4)
    on_cpu = run(engine("qwen2", "plain"), prompts_of(LENGTHS), params)
    on_gpu = run(engine("qwen2", method, device="cuda", **rule), prompts_of(LENGTHS), params)
    assert ids(on_gpu) == ids(on_cpu)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", forms.METHODS)
def test_outputs_of_a_form_equal_the_cpus(method: str, temperature: float):
    params = forms.asking(forms.regex(forms.REGEXES[0]), temperature=temperature)
    on_cpu = run(forms.engine("plain"), forms.PROMPTS, params)
    on_gpu = run(forms.engine(method, "drafter_invariant", device="cuda"), forms.PROMPTS, params)
    assert ids(on_gpu) == ids(on_cpu)


@pytest.mark.parametrize("has_rules", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_launching_a_step_waits_for_nothing(temperature: float, has_rules: bool):
    llm = engine("qwen2", "draft_model", device="cuda")
    rules = LookingRules(llm, 1) if has_rules else None
    runner = llm.engine.runner
    launch = runner.launch

    def strict_launch(plan):
        with warnings.catch_warnings(action="ignore"):  # the mode is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(plan)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    params = greedy(12) if temperature == 0 else sampled(max_tokens=12)
    run(llm, prompts_of([5, 18]), params)  # first calls may allocate and compile
    runner.launch = strict_launch
    run(llm, prompts_of([6, 19]), params)
    assert rules is None or rules.num_told > 0


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_chains_that_live_rules_end_leave_the_text_alone(method: str):
    llm = engine("qwen3-window", method, 4, device="cuda")
    rules = RandomRules(llm, 2)
    outputs = run(llm, prompts_of(LENGTHS), greedy(30))
    assert ids(outputs) == greedy_oracle("qwen3-window", LENGTHS, 30)
    assert rules.num_short > 0
