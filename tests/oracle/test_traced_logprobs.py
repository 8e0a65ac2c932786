"""A trace's log-probabilities of drafted tokens are what transformers says of them."""

import dataclasses

import pytest
import torch

from outdraft.core.outputs import DraftTrace, RequestOutput
from outdraft.core.sampling import SamplingParams, SpeculationParams
from tests.oracle.engines import engine, pair, prompts_of, run

FAMILY = "qwen2"
NUM_TOKENS = 12
METHODS = (
    ("ngram", 0.0),
    ("ngram-tree", 0.0),
    ("draft_model", 0.8),
    ("eagle3-tree", 0.8),
    ("medusa-tree", 0.0),
    ("combined", 0.8),
)


def params(temperature: float, logprobs: int | None, *, trace: bool) -> SamplingParams:
    return SamplingParams(
        temperature=temperature,
        seed=3,
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
        logprobs=logprobs,
        speculation=SpeculationParams(trace=trace),
    )


def expected(text: list[int], step: DraftTrace) -> list[float]:
    """One forward pass of transformers for each row: the text, then the path to its parent."""
    parents = step.parents or tuple(range(len(step.drafted_ids)))
    values: list[float] = []
    for token_id, parent in zip(step.drafted_ids, parents, strict=True):
        path: list[int] = []
        while parent:
            path.insert(0, step.drafted_ids[parent - 1])
            parent = parents[parent - 1]
        with torch.inference_mode():
            logits_V = pair(FAMILY).oracle(torch.tensor([text + path])).logits[0, -1]
        values.append(float(logits_V.log_softmax(0)[token_id]))
    return values


def check(output: RequestOutput) -> int:
    """Compare every drafted row of a request; how many there were."""
    (completion,) = output.outputs
    assert completion.trace is not None
    text, num_rows = list(output.prompt_token_ids), 0
    emitted = list(completion.token_ids)
    for step in completion.trace:
        assert step.drafted_logprobs == pytest.approx(expected(text, step), abs=1e-4)
        num_rows += len(step.drafted_ids)
        text += emitted[: step.num_emitted]
        del emitted[: step.num_emitted]
    return num_rows


@pytest.mark.parametrize(("method", "temperature"), METHODS)
def test_every_drafted_row_has_the_target_s_raw_logprob_behind_its_parent(
    method: str, temperature: float
):
    llm = engine(FAMILY, method, 4)
    outputs = run(llm, prompts_of([9, 17]), params(temperature, 2, trace=True))
    assert sum(check(output) for output in outputs) > NUM_TOKENS


def test_requests_that_did_not_ask_for_both_have_none_and_change_nothing_beside_others():
    llm = engine(FAMILY, "combined", 4)
    prompts = prompts_of([9, 12, 17, 21])
    asked = [(0, True), (None, True), (1, False), (3, True)]
    wanted = [params(0.0, logprobs, trace=trace) for logprobs, trace in asked]
    outputs = run(llm, prompts, wanted)
    for output, (logprobs, trace) in zip(outputs, asked, strict=True):
        (completion,) = output.outputs
        assert (completion.trace is None) is not trace
        assert (completion.logprobs is None) is (logprobs is None)
        for row in completion.logprobs or []:
            assert len(row) in ((logprobs or 0), (logprobs or 0) + 1)
        if trace and logprobs is not None:
            check(output)
        elif completion.trace is not None:
            assert all(step.drafted_logprobs == () for step in completion.trace)
    alone = run(llm, prompts[3:], dataclasses.replace(wanted[3], speculation=SpeculationParams()))
    assert alone[0].outputs[0].logprobs is not None
    assert alone[0].outputs[0].token_ids == outputs[3].outputs[0].token_ids
