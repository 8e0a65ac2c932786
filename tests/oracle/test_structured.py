"""An output of a given form has it, whoever drafts; and speculation is as invisible as ever."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.errors import GenerationError, RequestError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.core.structured_outputs import StructuredOutput, Thoughts
from outdraft.engine.async_engine import AsyncEngine
from outdraft.engine.llm import LLM
from outdraft.runner import model_runner
from outdraft.structured import compiler, matcher, trial
from tests.engine.byte_level import tokenizer
from tests.oracle.engines import NoisePolicy, ids, run
from tests.oracle.forms import (
    EOS,
    METHODS,
    PROMPTS,
    REGEXES,
    Form,
    asking,
    engine,
    forms,
    regex,
    schema,
    sparse_engine,
)
from tests.pairwise import some

RECORD = schema(
    {
        "type": "object",
        "properties": {
            "cat": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}},
            "stop": {"type": "string", "maxLength": 6},
        },
        "required": ["cat", "stop"],
        "additionalProperties": False,
    }
)
RECORD_PARAMS: dict[str, Any] = {"max_tokens": 60}


@pytest.fixture(autouse=True)
def _no_process_for_every_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "tried", trial.grammar_source)


def check(outputs: Sequence[RequestOutput], form: Form) -> None:
    for output in outputs:
        for completion in output.outputs:
            assert completion.finish_reason == "stop"
            assert completion.token_ids[-1] == EOS
            assert EOS not in completion.token_ids[:-1]
            assert form.is_met(completion.text), (form.structured, completion.text)


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=8, deadline=None)
@given(form=forms)
def test_greedy_outputs_have_their_form_and_are_those_without_speculation(method: str, form: Form):
    outputs = run(engine(method), PROMPTS, asking(form))
    check(outputs, form)
    if method != "plain":
        assert ids(outputs) == ids(run(engine("plain"), PROMPTS, asking(form)))


@pytest.mark.parametrize("method", some(METHODS[1:], ["perfect-tree"]))
def test_so_they_are_with_the_kernels_of_the_reference(method: str):
    form = regex(REGEXES[0])
    outputs = run(engine(method, kernels="reference"), PROMPTS, asking(form))
    check(outputs, form)
    assert ids(outputs) == ids(run(engine("plain", kernels="reference"), PROMPTS, asking(form)))


@pytest.mark.parametrize(
    ("method", "rule"),
    [*((method, "block") for method in METHODS), ("draft_model", "token"), ("perfect", "token")],
)
@settings(max_examples=4, deadline=None)
@given(form=forms, seed=st.integers(0, 999))
def test_sampled_outputs_have_their_form(method: str, rule: str, form: Form, seed: int):
    """Requests with a seed run beside others, which the rule verifies."""
    params = [
        asking(form, temperature=1.0, seed=seed if at % 2 else None, n=2)
        for at in range(len(PROMPTS))
    ]
    check(run(engine(method, rule), PROMPTS, params), form)


@pytest.mark.parametrize("method", METHODS[1:])
@settings(max_examples=4, deadline=None)
@given(form=forms, seed=st.integers(0, 999))
def test_drafter_invariant_outputs_are_those_without_speculation(
    method: str, form: Form, seed: int
):
    params = asking(form, temperature=1.0, seed=seed, n=2)
    plain = run(engine("plain"), PROMPTS, params)
    assert ids(run(engine(method, "drafter_invariant"), PROMPTS, params)) == ids(plain)


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(form=forms, seed=st.integers(0, 999))
def test_a_target_that_drafts_over_a_part_of_its_text_keeps_to_the_form(form: Form, seed: int):
    outputs = run(sparse_engine(), PROMPTS, asking(form))
    check(outputs, form)
    assert ids(outputs) == ids(run(engine("plain"), PROMPTS, asking(form)))
    sampled = asking(form, temperature=1.0, seed=seed)
    check(run(sparse_engine(), PROMPTS, asking(form, temperature=1.0, seed=None)), form)
    outputs = run(sparse_engine("drafter_invariant"), PROMPTS, sampled)
    assert ids(outputs) == ids(run(engine("plain"), PROMPTS, sampled))


def test_drafts_over_a_part_of_a_text_are_accepted_in_outputs_with_a_form():
    llm = sparse_engine()
    run(llm, PROMPTS, asking(RECORD, **RECORD_PARAMS))
    assert llm.engine.stats.num_accepted_tokens > 0


MARK = "x"
MARKED = {"temperature": 1.0, "logit_bias": {tokenizer().token_to_id(MARK): 4.0}}


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=2, deadline=None)
@given(form=forms, seed=st.integers(0, 999))
def test_behind_thoughts_the_form_is_kept_whoever_drafts(method: str, form: Form, seed: int):
    behind = Form(replace(form.structured, behind=Thoughts(MARK)), form.is_met)
    params = asking(behind, seed=seed, **MARKED)
    outputs = run(engine(method, "drafter_invariant"), PROMPTS, params)
    if method != "plain":
        assert ids(outputs) == ids(run(engine("plain"), PROMPTS, params))
    for output in outputs:
        [completion] = output.outputs
        thoughts, mark, answer = completion.text.partition(MARK)
        assert mark, thoughts  # likely enough to come within every output
        assert completion.finish_reason == "stop"
        assert form.is_met(answer), (form.structured, answer)


@settings(max_examples=15, deadline=None)
@given(form=forms, seed=st.integers(0, 9999), temperature=st.sampled_from([0.0, 1.0]))
def test_random_trees_change_nothing(form: Form, seed: int, temperature: float):
    params = asking(form, temperature=temperature)
    right = ids(run(engine("plain"), PROMPTS, params))
    llm = engine("ngram", "drafter_invariant")
    known = {f"{i}/0": tokens for i, tokens in enumerate(right)}
    llm.engine.drafting = NoisePolicy(llm, known, seed)
    assert ids(run(llm, PROMPTS, params)) == right


def test_drafts_are_accepted_in_outputs_with_a_form():
    llm = engine("perfect")
    run(llm, PROMPTS, asking(RECORD, **RECORD_PARAMS))
    free = engine("ngram")
    right = ids(run(engine("plain"), PROMPTS, asking(RECORD, **RECORD_PARAMS)))
    free.engine.drafting = NoisePolicy(free, {f"{i}/0": r for i, r in enumerate(right)}, 0)
    run(free, PROMPTS, asking(RECORD, **RECORD_PARAMS))
    assert llm.engine.stats.num_accepted_tokens > 0
    assert free.engine.stats.num_accepted_tokens > 0


OTHERS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    "allowed": {"allowed_token_ids": list(range(0, 290, 3))},
    "allowed-nothing-of-use": {"allowed_token_ids": [0]},
    "bias": {"logit_bias": {0: 100.0, 60: 100.0, EOS: -100.0}},
    "min-tokens": {"min_tokens": 40},
    "bad-words": {"bad_words": ["e", "1", "o"]},
    "stop-ids": {"stop_token_ids": [19, 20, 21, 22, 23]},
    "cuts": {"top_k": 5, "top_p": 0.9, "min_p": 0.02},
    "logprobs": {"logprobs": 2},
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", OTHERS)
def test_with_any_other_parameter_the_form_is_kept_and_speculation_is_invisible(
    name: str, temperature: float
):
    for form in (regex(REGEXES[0]), regex(REGEXES[2])):
        params = asking(form, temperature=temperature, **OTHERS[name])
        plain = run(engine("plain"), PROMPTS, params)
        for output in plain:
            text = output.outputs[0].text
            if output.outputs[0].stop_reason is not None:
                text = tokenizer().decode(output.outputs[0].token_ids[:-1])
            assert form.is_met(text)
        for method in ("combined", "perfect"):
            assert ids(run(engine(method, "drafter_invariant"), PROMPTS, params)) == ids(plain)


@pytest.mark.parametrize("method", METHODS)
def test_a_stop_string_and_the_most_tokens_may_cut_it(method: str):
    form = regex("(the cat |on the mat ){3,9}")
    cut = run(engine(method), PROMPTS, asking(form, stop="at", max_tokens=50))
    assert {output.outputs[0].text for output in cut} <= {"the c", "on the m"}
    short = run(engine(method), PROMPTS, asking(form, max_tokens=3))
    assert all(output.outputs[0].finish_reason == "length" for output in short)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", METHODS)
def test_a_neighbour_without_a_form_is_unchanged(method: str, temperature: float):
    free = SamplingParams(temperature=temperature, max_tokens=30, seed=8, ignore_eos=True)
    formed = asking(RECORD, temperature=temperature, **RECORD_PARAMS)
    alone = run(engine(method), PROMPTS, [free] * 3)
    mixed = run(engine(method), PROMPTS, [free, formed, free])
    rule = {} if temperature == 0.0 or method == "plain" else {"rule": "drafter_invariant"}
    if rule:  # what is drafted for whom depends on the neighbours
        alone, mixed = (
            run(engine(method, **rule), PROMPTS, params)
            for params in ([free] * 3, [free, formed, free])
        )
    assert [ids(mixed)[i] for i in (0, 2)] == [ids(alone)[i] for i in (0, 2)]
    only = run(engine(method, **rule), PROMPTS, formed)
    assert ids(mixed)[1] == ids(only)[1]


@pytest.mark.parametrize("method", METHODS)
def test_preemption_does_not_touch_it(method: str):
    form = regex("([0-9]{4} ){12}")
    llm = engine(method, num_blocks=10, enable_prefix_caching=False, max_model_len=128)
    outputs = run(llm, PROMPTS, asking(form, max_tokens=90))
    assert any(output.metrics.num_preemptions for output in outputs)
    check(outputs, form)
    assert ids(outputs) == ids(run(engine("plain"), PROMPTS, asking(form)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_no_token_ends_a_text_it_ends_when_it_is_complete(method: str, temperature: float):
    form = regex(REGEXES[0])
    outputs = run(engine(method), PROMPTS, asking(form, temperature=temperature, ignore_eos=True))
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        assert EOS not in output.outputs[0].token_ids
        assert form.is_met(output.outputs[0].text)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_past_the_end_of_a_grammar_change_nothing(method: str, temperature: float):
    form = regex("([0-9][x-z]){4}")
    params = asking(form, temperature=temperature, ignore_eos=True)
    plain = run(engine("plain"), PROMPTS, params)
    longer = [replace(params, prediction=[*right, *right, 0]) for right in ids(plain)]
    outputs = run(engine(method, "drafter_invariant"), PROMPTS, longer)
    assert ids(outputs) == ids(plain)
    for output in outputs:
        assert output.outputs[0].finish_reason == "stop"
        assert form.is_met(output.outputs[0].text)


@pytest.mark.parametrize("method", ["plain", "combined"])
def test_only_a_request_whose_grammar_takes_too_long_fails(
    method: str, monkeypatch: pytest.MonkeyPatch
):
    llm = engine(method)
    form, slow = regex(REGEXES[0]), regex(REGEXES[1])
    asked = [asking(form), asking(slow), asking(form)]
    right = ids(run(llm, PROMPTS, asked))
    original = matcher.SequenceMatcher._masks
    may_end = threading.Event()

    def masks(self: matcher.SequenceMatcher, *args: Any) -> list[int]:
        while len(self._output) > 2 and self._grammar is slow_grammar and not may_end.is_set():
            pass
        return original(self, *args)

    slow_grammar = llm.engine.inputs.grammar(asked[1])
    assert slow_grammar is not None
    monkeypatch.setattr(matcher.SequenceMatcher, "_masks", masks)
    try:
        with pytest.raises(GenerationError, match=r"more than 0\.5 s") as caught:
            run(llm, PROMPTS, asked)
    finally:
        may_end.set()
    outputs = caught.value.outputs
    assert [output.error is None for output in outputs] == [True, False, True]
    assert [ids(outputs)[i] for i in (0, 2)] == [right[i] for i in (0, 2)]
    assert outputs[1].outputs[0].finish_reason == "error"
    cut = outputs[1].outputs[0].token_ids
    assert cut == right[1][: len(cut)]
    assert not llm.engine.has_work


def test_a_wrong_form_is_refused_before_anything_starts():
    llm = engine("plain")
    wrong = SamplingParams(structured=StructuredOutput("regex", "a("))
    with pytest.raises(RequestError, match="unclosed group") as caught:
        llm.generate(PROMPTS, [SamplingParams(), wrong, SamplingParams()], use_tqdm=False)
    assert caught.value.field == "structured"
    assert not llm.engine.has_work


def test_a_form_needs_a_tokenizer():
    llm = engine("plain")
    bare = LLM.from_config(llm.config, replace(llm.models, tokenizer=None))
    with pytest.raises(RequestError, match="came without one") as caught:
        bare.generate(PROMPTS, SamplingParams(structured=StructuredOutput("json_object")))
    assert caught.value.field == "structured"


def test_the_asynchronous_engine_compiles_off_its_thread(monkeypatch: pytest.MonkeyPatch):
    wrong = SamplingParams(structured=StructuredOutput("regex", "a("))

    async def talk() -> list[RequestOutput]:
        async with AsyncEngine(engine("ngram").engine) as streams:
            with pytest.raises(RequestError, match="unclosed group"):
                async for _ in streams.generate("wrong", PROMPTS[0], wrong):
                    pass
            right = asking(regex(REGEXES[0]))
            return [output async for output in streams.generate("right", PROMPTS[0], right)]

    outputs = asyncio.run(talk())
    check(outputs[-1:], regex(REGEXES[0]))


def test_only_a_grammar_that_must_know_model_drafts_makes_a_step_wait(
    monkeypatch: pytest.MonkeyPatch,
):
    copies: list[object] = []
    original = model_runner.copy_of_drafted

    def noted(*args: Any) -> Any:
        copies.append(original(*args))
        return copies[-1]

    monkeypatch.setattr(model_runner, "copy_of_drafted", noted)
    free = SamplingParams(temperature=0.0, max_tokens=20)
    run(engine("perfect"), PROMPTS, free)
    run(engine("ngram"), PROMPTS, asking(RECORD, **RECORD_PARAMS))
    assert copies
    assert not any(copies)
    run(engine("perfect"), PROMPTS, asking(RECORD, **RECORD_PARAMS))
    assert any(copies)
