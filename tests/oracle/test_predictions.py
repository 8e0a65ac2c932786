"""With a prediction the output is what it is without, token for token, whatever was asked for.

A prediction is a deterministic draft, matched with the target's own choices: the same noise gives
the same tokens at any temperature.
"""

from itertools import product

import pytest

from outdraft import SamplingParams
from tests.oracle.engines import engine, ids, prompts_of, run, with_kernels

LENGTHS = (4, 19, 33)
FAMILY = "qwen2"
WISHES = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0},
    "cut": {"temperature": 0.7, "top_k": 12, "top_p": 0.9, "min_p": 0.02},
    "penalties": {
        "temperature": 0.9,
        "presence_penalty": 0.6,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.2,
    },
    "lists": {
        "temperature": 0.8,
        "logit_bias": {5: 2.0},
        "allowed_token_ids": list(range(2, 20)),
        "min_tokens": 10,
        "stop_token_ids": [7],
    },
    "several": {"temperature": 1.0, "n": 3, "logprobs": 3},
}


@pytest.mark.parametrize(
    ("wish", "changed", "kernels"), with_kernels(product(WISHES, (0, 4)), [("cut", 4)])
)
def test_a_prediction_changes_no_token(wish: str, changed: int, kernels: str):
    values = {"max_tokens": 40, "ignore_eos": True, **WISHES[wish]}
    prompts = prompts_of(LENGTHS)
    params = [SamplingParams(seed=i, **values) for i in range(len(prompts))]
    plain = run(engine(FAMILY, "plain", kernels=kernels), prompts, params)
    predicted = []
    for i, output in enumerate(plain):
        guess = list(output.outputs[0].token_ids)
        for at in range(3, len(guess), len(guess) // changed if changed else len(guess) + 3):
            guess[at] = (guess[at] + 1) % 20
        predicted.append(SamplingParams(seed=i, prediction=guess, **values))
    llm = engine(FAMILY, "suffix", kernels=kernels)
    outputs = run(llm, prompts, predicted)
    assert ids(outputs) == ids(plain)
    for output, base in zip(outputs, plain, strict=True):
        accepted = output.metrics.speculative_decoding.accepted_by_source
        assert accepted.get("prediction", 0) > len(base.outputs[0].token_ids) // 4
        for own, other in zip(output.outputs, base.outputs, strict=True):
            assert own.finish_reason == other.finish_reason
            if own.logprobs is not None:
                assert own.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
