"""What reports carry is the whole output: put together again, it is what the engine had."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from outdraft.core.outputs import RequestOutput, SpeculationMetrics
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.server.assembly import RequestAssembly, engine_params
from outdraft.server.client import TextDelta
from outdraft.server.messages import Add, Command, Progress, Report
from outdraft.server.progress import ProgressReporter
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
) -> tuple[RequestOutput, list[TextDelta]]:
    """A request whose every report goes over the wire."""
    core = llm.engine
    encoded = core.inputs.encoded(prompt)
    assembly = RequestAssembly("0", encoded, params, core.inputs.tokenizer)
    reporter, deltas = ProgressReporter(), []
    core.add_request("0", encoded, engine_params(params))
    while core.has_work:
        for output in core.step():
            frame = msgspec.msgpack.encode([reporter.report(output, 0.25)])
            [progress] = msgspec.msgpack.decode(frame, type=list[Report])
            assert isinstance(progress, Progress)
            for index in assembly.add(progress):
                core.stop_sequence("0", index)
            deltas.extend(assembly.update().deltas)
            core.check_invariants()
    return assembly.output, deltas


def comparable(output: RequestOutput) -> RequestOutput:
    """Without times; and of several sequences, what drafts have no part in.

    The proposers learn a little more of a sequence that is ended from outside.
    """
    if len(output.outputs) > 1 and any(isinstance(c.stop_reason, str) for c in output.outputs):
        completions = [replace(c, origins=[], trace=None) for c in output.outputs]
        speculation = SpeculationMetrics(0)
    else:
        completions, speculation = output.outputs, output.metrics.speculative_decoding
    metrics = replace(
        output.metrics,
        arrival_s=0.0,
        first_scheduled_s=0.0,
        first_token_s=0.0,
        last_token_s=0.0,
        finished_s=0.0,
        speculative_decoding=speculation,
    )
    return replace(output, metrics=metrics, outputs=completions, request_id="")


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
            assert sum(s.num_emitted for d in own for s in d.steps or ()) == len(
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


@pytest.mark.parametrize("is_included", [False, True])
@pytest.mark.parametrize("num_sequences", [1, 3])
def test_stop_strings_end_the_text_where_the_engine_would(num_sequences: int, is_included: bool):
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
    assert num_stopped >= 5


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
    frame = msgspec.msgpack.encode(Add("0", [1, 2], params, -3))
    command = msgspec.msgpack.decode(frame, type=Command)
    assert command == Add("0", [1, 2], replace(params, allowed_token_ids=[1, 2, 3]), -3)
