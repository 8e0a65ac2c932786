"""What crosses the wire is the whole output: assembled behind it, it is the one made beside the
engine."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest

from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import RequestAssembly
from outdraft.engine.llm import LLM
from outdraft.server.messages import Add, Command, Progress, Report
from tests.server.process.engines import PROMPTS, config, offline

# fmt: off
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": {"seed": 3},
    "several sequences": {"seed": 3, "n": 3},
    "several sequences, traced": {"seed": 3, "n": 3, "speculation": {"trace": True}},
    "log-probabilities": {"seed": 1, "logprobs": 3, "prompt_logprobs": 2},
    "only the chosen token's": {"seed": 1, "logprobs": 0, "prompt_logprobs": 0, "n": 2},
    "plain": {"seed": 5, "speculation": {"enabled": False}},
    "stop tokens": {"seed": 5, "stop_token_ids": list(range(2, 80)), "min_tokens": 4},
    "without text": {"seed": 5, "detokenize": False, "logprobs": 1},
}
# fmt: on


def fresh() -> LLM:
    """An engine that has learnt nothing from earlier requests."""
    return LLM.from_config(config(), offline().models)


def reported(
    llm: LLM, prompt: str, params: SamplingParams
) -> tuple[RequestOutput, list[CompletionOutput]]:
    """A request whose every delta goes over the wire."""
    core = llm.engine
    encoded = core.inputs.encoded(prompt)
    assembly = RequestAssembly("0", encoded, params, core.inputs)
    deltas: list[CompletionOutput] = []
    core.add_request("0", encoded, params)
    while core.has_work:
        if not (news := core.step()):
            continue
        frame = msgspec.msgpack.encode([Progress(news)])
        [progress] = msgspec.msgpack.decode(frame, type=list[Report])
        assert progress == Progress(news)
        for delta in progress.deltas:
            gained, stopped = assembly.add(delta)
            deltas.extend(gained)
            for completion in stopped:
                core.stop_sequence("0", completion.index, len(completion.token_ids))
        core.check_invariants()
    return assembly.output, deltas


def comparable(output: RequestOutput) -> RequestOutput:
    """Without times."""
    metrics = replace(
        output.metrics,
        arrival_s=0.0,
        first_scheduled_s=0.0,
        first_token_s=0.0,
        last_token_s=0.0,
        finished_s=0.0,
    )
    return replace(output, metrics=metrics, request_id="")


def agree(params: SamplingParams) -> RequestOutput:
    """The output, the same from reports as from the engine itself."""
    [want] = fresh().generate([PROMPTS[0]], params, use_tqdm=False)
    got, deltas = reported(fresh(), PROMPTS[0], params)
    assert comparable(got) == comparable(want)
    for completion in got.outputs:
        own = [delta for delta in deltas if delta.index == completion.index]
        assert "".join(delta.text for delta in own) == completion.text
        assert [i for delta in own for i in delta.token_ids] == completion.token_ids
        assert [o for delta in own for o in delta.origins] == completion.origins
        assert [delta.finish_reason for delta in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == completion.finish_reason
        if completion.logprobs is not None:
            assert [row for delta in own for row in delta.logprobs or ()] == completion.logprobs
        if completion.trace is not None:
            assert sum(s.num_emitted for d in own for s in d.trace or ()) == len(
                completion.token_ids
            )
    return got


def test_reports_of_a_lossy_engine_say_that_it_is():
    speculation = {"method": "ngram", "rejection_sample_method": "lossy_typical"}
    lossy = LLM.from_config(config(speculative_config=speculation), offline().models)
    output, _ = reported(lossy, PROMPTS[0], SamplingParams(max_tokens=8, seed=1))
    assert output.metrics.speculative_decoding.lossless is False
    exact, _ = reported(fresh(), PROMPTS[0], SamplingParams(max_tokens=8, seed=1))
    assert exact.metrics.speculative_decoding.lossless is True


@pytest.mark.parametrize("case", CASES)
def test_reports_make_the_same_output(case: str):
    output = agree(SamplingParams(max_tokens=40, **CASES[case]))
    assert output.finished


def cut(whole: CompletionOutput, stop: str, min_tokens: int, is_included: bool) -> tuple[str, int]:
    """Text and number of tokens of an output whose stop string is looked for after every token."""
    tokenizer = offline().models.tokenizer
    assert tokenizer is not None
    prompt_ids = tokenizer.encode(PROMPTS[0]).ids
    num_prompt = len(tokenizer.decode(prompt_ids))
    before = ""
    for count in range(1, len(whole.token_ids) + 1):
        text = tokenizer.decode(prompt_ids + whole.token_ids[:count])[num_prompt:]
        at = text.find(stop, max(0, len(before) - len(stop) + 1))
        if at >= 0 and count >= min_tokens:
            return text[: at + len(stop) if is_included else at], count
        before = text
    return whole.text, len(whole.token_ids)


@pytest.mark.parametrize("is_included", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_stop_strings_end_the_text_at_the_first_token_that_completes_one(
    num_sequences: int, is_included: bool
):
    params = SamplingParams(
        max_tokens=60,
        seed=8,
        ignore_eos=True,
        n=num_sequences,
        include_stop_str_in_output=is_included,
        speculation={"trace": True},
    )
    whole = agree(params).outputs
    num_stopped = 0
    for start in (3, 9, 17):
        stop = whole[0].text[start : start + 2]
        for min_tokens in (0, 12):
            output = agree(replace(params, stop=[stop, "never"], min_tokens=min_tokens))
            num_stopped += sum(c.stop_reason == stop for c in output.outputs)
            for one, all_of_it in zip(output.outputs, whole, strict=True):
                text, count = cut(all_of_it, stop, min_tokens, is_included)
                assert (one.text, one.token_ids) == (text, all_of_it.token_ids[:count])
    assert num_stopped >= 5


def test_the_proposers_learn_a_stopped_text_up_to_its_stop_string(monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm = fresh()
    [whole] = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    stop = whole.outputs[0].text[6:9]
    learned: list[list[int]] = []
    finish = llm.engine.drafting.finish

    def learning(request):
        learned.append(request.token_ids.tolist())
        finish(request)

    monkeypatch.setattr(llm.engine.drafting, "finish", learning)
    got, _ = reported(llm, PROMPTS[0], replace(params, stop=stop))
    [completion] = got.outputs
    assert completion.stop_reason == stop
    assert learned == [got.prompt_token_ids + completion.token_ids]


def test_a_stop_string_inside_a_draft_drops_what_was_drafted_behind_it():
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    llm = fresh()
    [whole] = llm.generate([PROMPTS[0]], params, use_tqdm=False)
    stop = whole.outputs[0].text[6:9]
    got, _ = reported(llm, PROMPTS[0], replace(params, stop=stop))  # suffixes know the text now
    speculation = got.metrics.speculative_decoding
    [completion] = got.outputs
    assert completion.stop_reason == stop
    assert completion.token_ids == whole.outputs[0].token_ids[: len(completion.token_ids)]
    assert speculation.num_accepted_draft_tokens == sum(
        origin == "suffix" for origin in completion.origins
    )


def test_every_parameter_arrives():
    params = SamplingParams(
        n=2,
        temperature=1,
        logit_bias={3: 1.5},
        bad_words=["x"],
        allowed_token_ids=(1, 2, 3),
        stop_token_ids=[4],
        prediction=[5, 6],
        speculation={"num_speculative_tokens": 2},
    )
    frame = msgspec.msgpack.encode(Add("0", np.array([1, 2], np.int32).tobytes(), params, -3))
    command = msgspec.msgpack.decode(frame, type=Command)
    assert command == Add(
        "0", np.array([1, 2], np.int32).tobytes(), replace(params, allowed_token_ids=[1, 2, 3]), -3
    )
