"""Rows of logits exist a part after the other: nothing else changes."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.kernels.data import logits
from outdraft.kernels.data.logits import most_logit_rows, request_parts
from tests.oracle import forms
from tests.oracle.engines import config, engine, ids, prompts_of, run, speculation
from tests.ranks import Spread, spread_models

CPU = torch.device("cpu")
ROWS = 3  # of a part
LENGTHS = (5, 30, 17, 9, 21)


@given(
    st.lists(st.integers(0, 9), min_size=1, max_size=30),
    st.integers(1, 40),
    st.booleans(),
)
def test_parts_are_all_requests_in_order_and_no_larger_than_they_may_be(
    num_drafts, most_rows, is_padded
):
    parts = request_parts(num_drafts, most_rows, is_padded=is_padded)

    def rows_of(requests: slice) -> int:
        counts = [count + 1 for count in num_drafts[requests]]
        return len(counts) * max(counts) if is_padded else sum(counts)

    for part, behind in itertools.pairwise(parts):
        assert (part.requests.stop, part.rows.stop) == (behind.requests.start, behind.rows.start)
        longer = slice(part.requests.start, part.requests.stop + 1)
        assert rows_of(longer) > most_rows, "the next request had room here"
    assert parts[0].requests.start == parts[0].rows.start == 0
    assert parts[-1].requests.stop == len(num_drafts)
    for part in parts:
        own = num_drafts[part.requests]
        assert part.rows.stop - part.rows.start == sum(own) + len(own)
        assert part.width == max(own)
        assert len(own) == 1 or rows_of(part.requests) <= most_rows


def test_a_part_of_a_large_vocabulary_has_few_rows_and_one_at_least():
    assert most_logit_rows(151_936, torch.float32, CPU) == 27
    assert most_logit_rows(1 << 30, torch.float32, CPU) == 1
    assert most_logit_rows(151_936, torch.float32, torch.device("cuda")) > 256


def has_parts(monkeypatch: pytest.MonkeyPatch, llm: LLM, num_rows: int = ROWS) -> None:
    vocab_size, dtype = llm.engine.inputs.vocab_size, llm.engine.runner.model.dtype
    width = torch.promote_types(dtype, torch.float32).itemsize
    monkeypatch.setattr(logits, "PART_BYTES", num_rows * vocab_size * width)


def told(outputs: list[RequestOutput]) -> list[object]:
    found: list[object] = [ids(outputs)]
    for output in outputs:
        found += [one.logprobs for one in output.outputs]
        found.append(output.prompt_logprobs)
    return found


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12),
    SamplingParams(temperature=0.9, max_tokens=14, top_k=20, top_p=0.9, logprobs=3),
    SamplingParams(
        temperature=0.8, max_tokens=12, seed=5, presence_penalty=0.5, logit_bias={3: 2.0}
    ),
    SamplingParams(temperature=1.0, max_tokens=9, min_tokens=4, allowed_token_ids=[*range(40)]),
    SamplingParams(temperature=0.0, max_tokens=12, prompt_logprobs=2, logprobs=0),
]
EACH = {
    "all at once": PARAMS,
    "greedy": [PARAMS[0]] * len(LENGTHS),
    "drawn": [SamplingParams(temperature=0.9, max_tokens=12)] * len(LENGTHS),
    "with penalties": [SamplingParams(temperature=0.9, max_tokens=12, frequency_penalty=0.3)]
    * len(LENGTHS),
}


@pytest.mark.parametrize("params", EACH)
@pytest.mark.parametrize(
    ("method", "kernels", "dtype"),
    [
        ("plain", "reference", "float64"),
        ("suffix", "auto", "float32"),
        ("draft_model", "reference", "float64"),
        ("draft_model", "auto", "float32"),
        ("draft_model-tree", "reference", "float64"),
        ("combined", "auto", "float32"),
        ("eagle3-tree", "auto", "float32"),
        ("medusa", "reference", "float64"),
    ],
)
def test_ids_and_log_probabilities_are_the_same_in_parts(
    method, kernels, dtype, params, monkeypatch
):
    prompts = prompts_of(LENGTHS)
    options = {"kernels": kernels, "dtype": dtype, "max_num_seqs": 8, "seed": 3}
    whole = told(run(engine("qwen2", method, **options), prompts, EACH[params]))
    llm = engine("qwen2", method, **options)
    has_parts(monkeypatch, llm)
    assert told(run(llm, prompts, EACH[params])) == whole


@pytest.mark.parametrize("method", ["plain", "ngram", "draft_model"])
def test_outputs_keep_to_their_grammars_in_parts(method, monkeypatch):
    form = forms.regex(r"(cat|dog)( (cat|dog)){3}")
    asked = [forms.asking(form, temperature=heat, logprobs=1) for heat in (0.0, 0.8, 1.0)]
    whole = told(run(forms.engine(method), forms.PROMPTS[:3], asked))
    llm = forms.engine(method)
    has_parts(monkeypatch, llm)
    assert told(run(llm, forms.PROMPTS[:3], asked)) == whole


@pytest.mark.slow
@pytest.mark.parametrize("method", ["plain", "ngram", "draft_model"])
def test_ids_and_log_probabilities_are_the_same_in_parts_on_several_ranks(method, monkeypatch):
    chosen = config("qwen2", speculation("qwen2", method, 3), max_num_seqs=8, seed=3)
    prompts = prompts_of(LENGTHS)

    def made(num_rows: int | None) -> list[object]:
        models = spread_models(chosen, 2, 1)
        llm = LLM.from_config(chosen, models[0])
        if num_rows is not None:
            has_parts(monkeypatch, llm, num_rows)
        with Spread(llm, models):
            return told(run(llm, prompts, PARAMS))

    assert made(None) == made(ROWS)
