"""In drafter-invariant mode the ids depend on the seed alone, at any temperature."""

from functools import cache
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from tests.oracle.engines import FAMILIES, METHODS, NoisePolicy, engine, ids, parts, prompts_of, run
from tests.pairwise import rows, some

LENGTHS = (4, 19, 33)
PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.7},
    "top-k-top-p": {"top_k": 12, "top_p": 0.8},
    "min-p": {"min_p": 0.05},
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    "greedy-penalties": {"temperature": 0.0, "repetition_penalty": 1.5, "frequency_penalty": 1.0},
    "bias": {"logit_bias": {5: 4.0, 7: -100.0}},
    "allowed": {"allowed_token_ids": list(range(10, 30))},
    "bad-words": {"bad_words": ["w5", "w17 w18", "w9"], "top_k": 8},
    "min-tokens": {"min_tokens": 12, "stop_token_ids": list(range(20, 40))},
    "stop-ids": {"stop_token_ids": [11, 12, 13]},
    "stop-strings": {"stop": ["w3", "w20", "w41 w"]},
    "n": {"n": 3},
    "logprobs": {"logprobs": 3, "prompt_logprobs": 2},
}


def sampled(**changes: Any) -> SamplingParams:
    defaults: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 24}
    return SamplingParams(**{"ignore_eos": True} | defaults | changes)


@cache
def plain_outputs(family: str, name: str, kernels: str = "auto") -> list[RequestOutput]:
    llm = engine(family, "plain", kernels=kernels)
    return run(llm, prompts_of(LENGTHS), sampled(**PARAMS[name]))


@pytest.mark.parametrize(
    ("method", "family", "name"),
    rows(
        product(METHODS[1:], FAMILIES, PARAMS),
        lambda method, family, name: (*parts(method), family, name),
    ),
)
def test_output_is_the_plain_output(method: str, family: str, name: str):
    rule = {"rejection_sample_method": "drafter_invariant"}
    plain = plain_outputs(family, name)
    outputs = run(engine(family, method, **rule), prompts_of(LENGTHS), sampled(**PARAMS[name]))
    assert ids(outputs) == ids(plain)
    for got, want in zip(outputs, plain, strict=True):
        for left, right in zip(got.outputs, want.outputs, strict=True):
            assert (left.text, left.finish_reason, left.stop_reason) == (
                right.text,
                right.finish_reason,
                right.stop_reason,
            )
            assert _rounded(left.logprobs) == _rounded(right.logprobs)
        assert _rounded(got.prompt_logprobs) == _rounded(want.prompt_logprobs)


@pytest.mark.parametrize("method", some(METHODS[1:], ["eagle3-tree"]))
def test_so_it_is_with_the_kernels_of_the_reference(method: str):
    llm = engine("qwen2", method, rejection_sample_method="drafter_invariant", kernels="reference")
    outputs = run(llm, prompts_of(LENGTHS), sampled(**PARAMS["top-k-top-p"]))
    assert ids(outputs) == ids(plain_outputs("qwen2", "top-k-top-p", "reference"))
    assert llm.engine.stats.num_drafts > 0


@pytest.mark.parametrize("method", ["perfect", "perfect-tree"])
def test_a_perfect_drafter_that_shares_the_noise_is_right(method: str):
    llm = engine("qwen2", method, rejection_sample_method="drafter_invariant")
    run(llm, prompts_of(LENGTHS), sampled(top_k=20, top_p=0.9, min_p=0.01))
    stats = llm.engine.stats
    if method == "perfect":
        assert stats.acceptance_rate == 1.0
    else:  # the likeliest path of a tree need not be the one with the likeliest tokens
        assert stats.num_accepted_tokens > 0.6 * 3 * stats.num_drafts


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10_000), name=st.sampled_from(sorted(PARAMS)))
def test_random_trees_change_no_sample(seed: int, name: str):
    """Deterministic drafts are matched with the target's own samples: equal in every mode."""
    params = sampled(**PARAMS[name])
    plain = run(engine("mistral-window", "plain"), prompts_of(LENGTHS), params)
    right = {
        f"{i}/{j}": completion.token_ids
        for i, output in enumerate(plain)
        for j, completion in enumerate(output.outputs)
    }
    llm = engine("mistral-window", "ngram", num_drafts=16, num_blocks=500)
    llm.engine.drafting = NoisePolicy(llm, right, seed)
    assert ids(run(llm, prompts_of(LENGTHS), params)) == ids(plain)


@pytest.mark.parametrize("method", ["plain", "ngram", "draft_model"])
def test_a_seeded_request_is_the_same_in_any_batch(method: str):
    rule = {"rejection_sample_method": "drafter_invariant"}
    prompts = prompts_of(LENGTHS)
    together = run(engine("qwen2", method, **rule), prompts, sampled(top_p=0.9))
    alone = [
        run(engine("qwen2", method, **rule), [prompt], sampled(top_p=0.9))[0] for prompt in prompts
    ]
    assert ids(together) == ids(alone)


def _rounded(rows: Any) -> Any:
    """Token ids, ranks and log-probabilities up to rounding."""
    if rows is None:
        return None
    return [
        row and {token: (round(entry.logprob, 3), entry.rank) for token, entry in row.items()}
        for row in rows
    ]
