"""A request that brings a seed gets one text, whatever drafts and whatever runs beside it.

Nothing is said about `rejection_sample_method`: the engines verify as they do by default, and the
requests beside those with a seed have none.
"""

from typing import Any

import pytest

from outdraft.core.sampling import SamplingParams
from tests.oracle.engines import METHODS, engine, ids, prompts_of, run, with_kernels
from tests.oracle.test_drafter_invariant import PARAMS

PROMPT, *OTHERS = prompts_of((19, 4, 33, 9))


def sampled(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, "max_tokens": 24, "ignore_eos": True} | changes)


SEEDED = sampled(seed=11)
NEIGHBOURS = [sampled(), sampled(temperature=0.0), sampled(top_k=7, top_p=0.9)]


@pytest.mark.parametrize(("method", "kernels"), with_kernels(METHODS, ["draft_model"]))
def test_a_seeded_request_gets_the_text_of_plain_decoding_among_others(method: str, kernels: str):
    [plain] = ids(run(engine("mistral-window", "plain", kernels=kernels), [PROMPT], SEEDED))
    llm = engine("mistral-window", method, num_blocks=200, kernels=kernels)
    prompts = [PROMPT, OTHERS[0], OTHERS[1], PROMPT, OTHERS[2], PROMPT, PROMPT]
    params = [SEEDED, *NEIGHBOURS[:2], SEEDED, NEIGHBOURS[2], SEEDED, SEEDED]
    outputs = run(llm, prompts, params)
    texts = [output.outputs[0].token_ids for output in outputs]
    assert [texts[at] for at in (0, 3, 5, 6)] == [plain] * 4
    if method != "plain":
        assert llm.engine.stats.num_drafts > 0


@pytest.mark.parametrize("method", ["combined", "eagle3-tree"])
@pytest.mark.parametrize("name", PARAMS)
def test_it_does_so_with_every_sampling_parameter(name: str, method: str):
    params = sampled(seed=11, **PARAMS[name])
    plain = run(engine("qwen2", "plain"), [PROMPT], params)
    outputs = run(
        engine("qwen2", method), [OTHERS[0], PROMPT, OTHERS[2]], [*NEIGHBOURS[:1], params, params]
    )
    assert ids(outputs[1:2]) == ids(plain)


@pytest.mark.parametrize("rule", ["block", "token", "lossy_typical"])
def test_it_does_so_whatever_rule_the_others_are_verified_by(rule: str):
    [plain] = ids(run(engine("qwen2", "plain"), [PROMPT], SEEDED))
    llm = engine("qwen2", "draft_model", rejection_sample_method=rule)
    outputs = run(llm, [PROMPT, OTHERS[0], PROMPT], [SEEDED, NEIGHBOURS[0], SEEDED])
    assert [outputs[at].outputs[0].token_ids for at in (0, 2)] == [plain] * 2


@pytest.mark.parametrize("method", ["plain", "combined", "draft_model-tree"])
def test_the_sequences_of_one_seeded_request_differ_and_are_the_same_every_time(method: str):
    several = sampled(seed=11, n=3)
    outputs = run(engine("qwen2", method), [PROMPT, PROMPT], several)
    first, second = ([one.token_ids for one in output.outputs] for output in outputs)
    assert first == second
    assert len({tuple(text) for text in first}) == 3
    assert first[0] == ids(run(engine("qwen2", "plain"), [PROMPT], SEEDED))[0]


@pytest.mark.parametrize("method", ["draft_model", "perfect", "perfect-tree"])
def test_the_drafts_of_seeded_requests_are_drawn_with_the_targets_noise(method: str):
    """A good drafter is right nearly always, as in drafter-invariant mode."""
    rates = [
        run_stats(engine("qwen2", method, **rule))
        for rule in ({}, {"rejection_sample_method": "drafter_invariant"})
    ]
    assert rates[0] == rates[1]
    if method == "perfect":
        assert rates[0] == 1.0


def run_stats(llm: Any) -> float:
    run(llm, [PROMPT, *OTHERS], SEEDED)
    return llm.engine.stats.acceptance_rate
