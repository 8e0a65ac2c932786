"""Log-probabilities are the same numbers however a text was computed, in every dtype of a CPU."""

import pytest

from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from tests.oracle.engines import engine, prompts_of, run

LENGTHS = (6, 25, 38, 3)
PARAMS = SamplingParams(
    temperature=0, max_tokens=20, ignore_eos=True, logprobs=3, prompt_logprobs=3
)
# Weights of qwen2 need float32; those of mistral-window fit bfloat16.
KINDS = [
    pytest.param("qwen2", "bfloat16", id="bfloat16"),
    pytest.param("mistral-window", "float32", id="float32-over-bfloat16"),
    pytest.param("qwen2", "float32", id="float32"),
    pytest.param("qwen2", "float64", id="float64"),
    pytest.param("qwen2", "float16", id="float16"),
]
DRAFTING = (
    *("ngram", "draft_model", "medusa"),
    *("suffix-tree", "draft_model-tree", "eagle3-tree"),
)
ALONE = {"max_num_seqs": 1, "max_num_batched_tokens": 512, "enable_prefix_caching": False}
WAYS = {
    "together": {},
    "tiny-chunks": {"max_num_batched_tokens": 4},
    "block-size-1": {"block_size": 1, "num_blocks": 400},
    "preempted": {"num_blocks": 6, "enable_prefix_caching": False},
    "preempted-with-prefix-cache": {"num_blocks": 6},
}


def kind(dtype: str) -> dict[str, str | None]:
    return {"dtype": dtype, "kernels": "reference" if dtype == "float64" else "auto"}


def numbers(outputs: list[RequestOutput]) -> list[object]:
    """Ids with the log-probabilities behind them, all digits."""
    return [
        (each.prompt_logprobs, done.token_ids, done.logprobs)
        for each in outputs
        for done in each.outputs
    ]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "dtype"), KINDS)
def test_a_batch_a_chunk_and_a_preemption_change_no_bit(family: str, dtype: str, way: str):
    prompts = prompts_of(LENGTHS)
    alone = run(engine(family, "plain", **kind(dtype), **ALONE), prompts, PARAMS)

    outputs = run(engine(family, "plain", **kind(dtype), **WAYS[way]), prompts, PARAMS)

    assert numbers(outputs) == numbers(alone)
    if WAYS[way].get("num_blocks") == 6:
        assert any(output.metrics.num_preemptions for output in outputs)


@pytest.mark.parametrize(("family", "dtype"), KINDS)
def test_a_prefix_hit_changes_no_bit(family: str, dtype: str):
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=3)
    llm = engine(family, "plain", **kind(dtype))
    prompts = prompts_of(LENGTHS)

    first = run(llm, prompts, params)
    second = run(llm, prompts, params)

    assert any(output.num_cached_tokens for output in second)
    assert numbers(second) == numbers(first)


@pytest.mark.parametrize("method", DRAFTING)
@pytest.mark.parametrize(("family", "dtype"), KINDS)
def test_drafts_change_no_bit(family: str, dtype: str, method: str):
    prompts = prompts_of(LENGTHS)
    plain = run(engine(family, "plain", **kind(dtype)), prompts, PARAMS)

    llm = engine(family, method, **kind(dtype))
    outputs = run(llm, prompts, PARAMS)

    assert numbers(outputs) == numbers(plain)
    assert sum(llm.engine.stats.drafted_by_source.values()) > 0
