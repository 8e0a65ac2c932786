"""A runner that reads plans from bytes, in an engine and without one.

The same requests in an engine whose plans are not copied are the oracle; what that engine must
answer is the claim of the other tests here.
"""

from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.outputs import RequestOutput
from outdraft.core.plan import StepPlan, StepResult
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import Assembler
from outdraft.engine.llm import LLM
from tests.oracle import forms
from tests.oracle.engines import METHODS, engine, ids, prompts_of, run
from tests.oracle.through_bytes import ThroughBytes
from tests.reference.plain_data import from_bytes

FAMILY = "qwen2"
SMALL = {"block_size": 4, "num_blocks": 18}  # too small for four requests at once
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "seed": 3, "logprobs": 2},
    {"temperature": 1.0, "top_k": 9, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.0, "stop": ["w7", "w9 w"], "presence_penalty": 0.5},
    {"temperature": 1.0, "stop_token_ids": [4, 5, 6, 8], "min_tokens": 4, "bad_words": ["w3"]},
    {"temperature": 0.7, "n": 2, "logit_bias": {5: 3.0, 6: -3}, "prompt_logprobs": 1},
    {"temperature": 0.0, "allowed_token_ids": [4, 7, 9], "speculation": {"trace": True}},
    {"temperature": 1.0, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
)


@dataclass(frozen=True)
class Arrival:
    """A request: in which step it comes, and in which its reader leaves; None: in none."""

    step: int
    leaves: int | None
    prompt: list[int]
    params: SamplingParams


def traffic(seed: int) -> list[Arrival]:
    rng = Random(seed)
    prompts = prompts_of([rng.randint(1, 26) for _ in range(4)], seed)
    arrivals: list[Arrival] = []
    for _ in range(7):
        step = rng.randint(0, 12)
        leaves = step + rng.randint(1, 9) if rng.random() < 0.3 else None
        params = SamplingParams(
            max_tokens=rng.randint(4, 28), ignore_eos=True, **rng.choice(PARAMS)
        )
        arrivals.append(Arrival(step, leaves, rng.choice(prompts), params))
    return arrivals


def answers(llm: LLM, arrivals: list[Arrival]) -> dict[str, object]:
    """All that the readers were told, until they left."""
    assembler, told = Assembler(llm.engine), dict[str, object]()
    for step in range(400):
        for number, one in enumerate(arrivals):
            if one.step == step:
                prompt = {"prompt_token_ids": one.prompt}
                assembler.add_request(str(number), prompt, one.params)
            if one.leaves == step:
                assembler.abort(str(number))
        told |= {output.request_id: _told(output) for output in assembler.step()}
        llm.engine.check_invariants()
        if not llm.engine.has_work and step > 12:
            return told
    raise AssertionError("it never ends")


def _told(output: RequestOutput) -> object:
    return [
        (one.token_ids, one.text, one.finish_reason, one.logprobs, one.cumulative_logprob)
        for one in output.outputs
    ], output.prompt_logprobs


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 10_000), st.sampled_from(METHODS), st.integers(1, 4))
def test_what_readers_are_told_is_the_same_under_aborts_preemption_and_stop_strings(
    seed: int, method: str, num_drafts: int
):
    arrivals = traffic(seed)
    want = answers(engine(FAMILY, method, num_drafts, **SMALL), arrivals)
    copying = engine(FAMILY, method, num_drafts, **SMALL)
    ThroughBytes(copying)
    assert answers(copying, arrivals) == want


def test_requests_are_preempted_and_readers_leave_in_such_traffic():
    readmitted = 0
    for seed in range(3):
        llm = engine(FAMILY, "suffix", **SMALL)
        crossing = ThroughBytes(llm)
        answers(llm, traffic(seed))
        readmitted += crossing.num_readmitted
    assert readmitted > 0
    assert any(one.leaves is not None for seed in range(3) for one in traffic(seed))


def params_of_every_kind() -> list[SamplingParams]:
    return [SamplingParams(max_tokens=20, ignore_eos=True, **one) for one in PARAMS]


@pytest.mark.parametrize("method", METHODS)
def test_a_runner_answers_to_written_plans_alone_and_a_step_ahead_of_its_reader(method: str):
    """No scheduler, no requests; each step is launched before the last one is collected."""
    prompts = prompts_of([3, 21, 17, 9, 30, 8, 12, 5])
    writing = engine(FAMILY, method, **SMALL)
    crossing = ThroughBytes(writing)
    run(writing, prompts, params_of_every_kind())
    assert crossing.num_readmitted > 0
    assert writing.engine.stats.num_draft_tokens > 0 or method == "plain"
    runner = engine(FAMILY, method, **SMALL).engine.runner
    launched = (runner.launch(from_bytes(StepPlan, data)) for data in crossing.plans)
    pending = next(launched)
    for data in crossing.results:
        ahead = next(launched, None)
        got, want = runner.collect(pending), from_bytes(StepResult, data)
        assert (got.works, got.num_rows) == (want.works, want.num_rows)
        pending = ahead


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", forms.METHODS)
def test_masks_and_the_drafts_that_they_are_made_for_cross_as_bytes(
    method: str, temperature: float
):
    params = [forms.asking(forms.regex(forms.REGEXES[0]), temperature=temperature, seed=1)]
    params += [SamplingParams(temperature=temperature, seed=2, max_tokens=12)]
    want = ids(run(forms.engine(method), forms.PROMPTS[:2], params))
    llm = forms.engine(method)
    crossing = ThroughBytes(llm)
    assert ids(run(llm, forms.PROMPTS[:2], params)) == want
    is_network = method.startswith(("draft_model", "perfect", "eagle3", "medusa"))
    assert (crossing.num_drafted > 0) == is_network or method == "combined"
