"""/v1/chat/completions, asked by OpenAI's own client."""

import json
from dataclasses import replace

import openai
import pytest
from tokenizers import Tokenizer

from outdraft.core.decision import Decision, Reason
from outdraft.core.outputs import (
    CompletionOutput,
    DraftTrace,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from outdraft.server.api.reports import metrics, trace
from tests.engine.byte_level import tokenizer
from tests.server.api.fake_engine import TEXT, FakeEngine, fake_inputs, with_script
from tests.server.api.serving import MODEL, serve

HELLO = [{"role": "user", "content": "hi"}]
ANSWER = f"{TEXT} 0"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


def chat(client, **options):
    return client.chat.completions.create(**{"model": MODEL, "messages": HELLO, **options})


def prompt_of(served) -> str:
    prompt, _, _ = served.engine.requests[-1]
    return served.engine.inputs.tokenizer.decode(prompt.token_ids.tolist(), False)


def params_of(served):
    return served.engine.requests[-1][1]


def test_an_answer_has_text_reason_and_counts(client):
    answer = chat(client)
    [choice] = answer.choices
    assert choice.message.content == ANSWER
    assert choice.message.role == "assistant"
    assert choice.finish_reason == "stop"
    assert answer.model == MODEL
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.usage.prompt_tokens // 2


def test_a_stream_adds_up_to_the_answer(client):
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [c.choices[0].finish_reason for c in chunks][-1] == "stop"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_several_choices_stream_interleaved_and_whole(client):
    whole = [choice.message.content for choice in chat(client, n=3).choices]
    assert whole == [f"{TEXT} {index}" for index in range(3)]
    texts = ["", "", ""]
    order = []
    for chunk in chat(client, n=3, stream=True):
        [choice] = chunk.choices
        order.append(choice.index)
        texts[choice.index] += choice.delta.content or ""
    assert texts == whole
    assert order[:6] == [0, 1, 2, 0, 1, 2]


def test_usage_comes_with_the_last_chunk_when_asked(client):
    *chunks, last = chat(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == chat(client).usage
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_can_come_with_every_chunk(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(chat(client, stream=True, stream_options=options))
    counts = [chunk.usage.completion_tokens for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1] == chat(client).usage.completion_tokens


def test_a_stop_string_ends_the_answer_before_it(client):
    answer = chat(client, stop=["never", "stop"])
    assert answer.choices[0].message.content == TEXT[: TEXT.index("stop")]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].model_extra["stop_reason"] == "stop"
    text = "".join(c.choices[0].delta.content or "" for c in chat(client, stop="stop", stream=True))
    assert text == answer.choices[0].message.content


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_both_names_of_the_limit_count(client, name):
    answer = chat(client, **{name: 3})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 3


def test_without_a_limit_an_answer_may_fill_the_context(served, client):
    chat(client)
    assert params_of(served).max_tokens is None


def test_logprobs_have_openais_shape(client):
    answer = chat(client, logprobs=True, top_logprobs=2, max_tokens=2)
    first, second = answer.choices[0].logprobs.content
    assert (first.token, first.bytes, first.logprob) == ("the", list(b"the"), -2.0)
    assert [top.logprob for top in first.top_logprobs] == [-1.0, -2.0]
    assert first.top_logprobs[1].token == "the"
    assert second.token == " cat"
    chunks = list(chat(client, logprobs=True, top_logprobs=2, max_tokens=2, stream=True))
    streamed = [e for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content]
    assert streamed == [first, second]


def test_logprobs_without_top_ones_tell_the_chosen_token_only(client):
    [entry] = chat(client, logprobs=True, max_tokens=1).choices[0].logprobs.content
    assert entry.top_logprobs == []


@pytest.mark.parametrize("route", ["chat", "response"])
@pytest.mark.parametrize("stream", [False, True])
def test_parts_of_characters_have_their_bytes(client, route, stream):
    answered = scored_chat(client, stream) if route == "chat" else scored_response(client, stream)
    assert b"".join(bytes(entry.bytes) for entry in answered).decode() == ANSWER
    parts = [entry for entry in answered if entry.token.startswith("bytes:")]
    assert parts
    for entry in parts:
        assert entry.token == "bytes:" + "".join(f"\\x{byte:02x}" for byte in entry.bytes)
    assert all(top.bytes is not None for entry in answered for top in entry.top_logprobs)


def scored_chat(client, stream):
    answer = chat(client, logprobs=True, top_logprobs=2, stream=stream)
    choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
    return [entry for one in choices if one.logprobs for entry in one.logprobs.content]


def scored_response(client, stream):
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    answer = client.responses.create(model=MODEL, input="hi", stream=stream, **options)
    if not stream:
        return answer.output[0].content[0].logprobs
    *_, last = answer
    return last.response.output[0].content[0].logprobs


def test_prompt_logprobs_have_vllms_shape(client):
    rows = chat(client, max_tokens=1, extra_body={"prompt_logprobs": 1}).model_extra
    first, second, *_ = rows["prompt_logprobs"]
    assert first is None
    assert sorted(entry["rank"] for entry in second.values()) == [1, 2]
    assert all(isinstance(entry["decoded_token"], str) for entry in second.values())


def test_token_ids_are_told_when_asked(served, client):
    answer = chat(client, max_tokens=4, extra_body={"return_token_ids": True})
    prompt, _, _ = served.engine.requests[-1]
    assert answer.model_extra["prompt_token_ids"] == prompt.token_ids.tolist()
    ids = answer.choices[0].model_extra["token_ids"]
    stream = chat(client, max_tokens=4, stream=True, extra_body={"return_token_ids": True})
    chunks = [chunk.choices[0].model_extra for chunk in stream]
    assert [i for extra in chunks for i in extra.get("token_ids", [])] == ids
    assert len(ids) == 4


def test_tokens_may_be_written_as_ids(client):
    extra = {"return_tokens_as_token_ids": True}
    answer = chat(client, logprobs=True, max_tokens=1, extra_body=extra)
    assert answer.choices[0].logprobs.content[0].token.startswith("token_id:")


def test_the_template_writes_every_kind_of_message(served, client):
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": x} for x in "ab"]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    chat(client, messages=messages)
    expected = "<system>be brief<user>a\nb<assistant>[f [('a', 1)]]<tool>5c1<assistant>"
    assert prompt_of(served) == expected


def test_a_whole_answer_can_be_sent_back(served, client):
    message = chat(client, max_tokens=2).choices[0].message
    chat(client, messages=[*HELLO, message.model_dump(), *HELLO])
    assert prompt_of(served) == "<user>hi<assistant>the cat<user>hi<assistant>"


def test_predictions_and_speculation_reach_the_engine(served, client):
    prediction = {"type": "content", "content": [{"type": "text", "text": "the dog"}]}
    speculation = {"num_speculative_tokens": 2, "method": "suffix"}
    answer = chat(client, prediction=prediction, extra_body={"speculation": speculation})
    params = params_of(served)
    assert params.prediction == "the dog"
    assert params.speculation.method == "suffix"
    assert params.speculation.num_speculative_tokens == 2
    details = answer.usage.completion_tokens_details
    steps = (answer.usage.completion_tokens + 1) // 2
    assert details.accepted_prediction_tokens == details.rejected_prediction_tokens == steps


def test_speculation_can_be_turned_off(served, client):
    chat(client, extra_body={"speculation": {"enabled": False}})
    assert not params_of(served).speculation.enabled


@pytest.mark.parametrize(
    "extra", [{"include_metrics": True}, {"speculation": {"method": "suffix"}}]
)
def test_speculation_metrics_have_vllms_names(client, extra):
    answer = chat(client, max_tokens=6, extra_body=extra)
    metrics = answer.model_extra["metrics"]["speculative_decoding"]
    assert metrics == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.5,
        "acceptance_histogram": [0, 3, 0],
        "acceptance_histogram_by_draft_length": {"2": [0, 3, 0]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 6,
        "num_spec_tokens": 2,
        "lossless": True,
        "per_step_accepted": [1, 1, 1],
        "per_step_drafted": [2, 2, 2],
        "drafted_by_source": {"prediction": 6},
        "accepted_by_source": {"prediction": 3},
    }
    *_, last = chat(client, max_tokens=6, extra_body=extra, stream=True)
    assert last.model_extra["metrics"]["speculative_decoding"] == metrics


@pytest.mark.parametrize("lossless", [True, False])
def test_chats_and_completions_say_whether_the_engine_is_lossless(lossless):
    with serve(replace(FakeEngine(), lossless=lossless)) as served:
        client = served.client()
        asked = {"max_tokens": 4, "extra_body": {"include_metrics": True}}
        *_, chunk = chat(client, stream=True, **asked)
        *_, text_chunk = client.completions.create(model="tiny", prompt="a", stream=True, **asked)
        whole = client.completions.create(model="tiny", prompt="a", **asked)
        for answer in (chat(client, **asked), chunk, whole, text_chunk):
            assert answer.model_extra["metrics"]["speculative_decoding"]["lossless"] is lossless


def test_nobody_gets_metrics_unasked(client):
    assert "metrics" not in chat(client).model_extra


def test_a_trace_tells_of_every_token_and_draft(client):
    extra = {"speculation": {"trace": True}}
    chunks = list(chat(client, stream=True, extra_body=extra, max_tokens=4))
    traces = [c.choices[0].model_extra.get("outdraft") for c in chunks if c.choices]
    traces = [trace for trace in traces if trace is not None]
    tokens = [token for trace in traces for token in trace["tokens"]]
    assert "".join(token["text"] for token in tokens) == "the cat sat"
    assert [token["origin"] for token in tokens] == ["prediction", "recovered"] * 2
    [step] = traces[0]["steps"]
    assert step["source"] == "prediction"
    assert [token["text"] for token in step["drafted"]] == ["the", step["drafted"][1]["text"]]
    assert (step["accepted_rows"], step["num_emitted"], step["seconds"]) == ([0], 2, 0.25)


def test_a_trace_tells_why_a_step_drafted_as_it_did():
    priced = Decision(Reason.GAIN, (), 0.5, 0.1, 0.2, 0.3, 0.5, 4.0, 0.25)
    held = Decision(Reason.NO_GAIN)
    steps = [
        DraftTrace((), (), (), (), 1, granted=granted, decision=decision)
        for granted, decision in ((4, priced), (0, held), (0, None))
    ]
    delta = CompletionOutput(0, trace=steps)
    told = trace(delta, None)
    assert told is not None
    beside = ("source", "drafted", "parents", "accepted_rows", "num_emitted", "seconds")
    fields = [{k: v for k, v in one.items() if k not in beside} for one in told["steps"]]
    assert fields[0] == {
        "reason": "gain",
        "granted": 4,
        "price": 0.5,
        "predicted_seconds": pytest.approx(0.6),
        "predicted_gain": 0.25,
    }
    assert fields[1:] == [{"reason": "no_gain", "granted": 0}, {}]


def summary(steps):
    """What the metrics of a request with these steps say of its trace."""
    found = RequestMetrics(0.0, SpeculationMetrics(3))
    outputs = [CompletionOutput(0, trace=steps[:1]), CompletionOutput(1, trace=steps[1:])]
    told = metrics(RequestOutput("0", None, [], outputs, True, found))["speculative_decoding"]
    return {name: told[name] for name in ("acceptance_by_level", "decisions") if name in told}


@pytest.mark.parametrize(
    ("parents", "accepted_rows", "num_emitted", "levels"),
    [
        ((), (), 1, []),
        ((0, 1, 2), (), 1, [(1, 0)]),
        ((0, 1, 2), (0,), 2, [(1, 1), (1, 0)]),
        ((0, 1, 2), (0, 1, 2), 4, [(1, 1), (1, 1), (1, 1)]),
        ((0, 0, 1), (1,), 2, [(1, 1)]),  # the accepted branch ends there
        ((0, 0, 1), (0,), 2, [(1, 1), (1, 0)]),
        ((0, 1, 2), (0, 1), 1, [(1, 1)]),  # the text ends inside the draft
        ((0, 1, 2), (0, 1), 2, [(1, 1), (1, 1)]),  # and right behind what was accepted
    ],
)
def test_a_trace_is_summed_up_by_level(parents, accepted_rows, num_emitted, levels):
    ids = tuple(range(len(parents)))
    step = DraftTrace(("suffix",) * len(ids), ids, parents, accepted_rows, num_emitted)
    want = [
        {"level": level, "reached": reached, "accepted": accepted}
        for level, (reached, accepted) in enumerate(levels, 1)
    ]
    assert summary([step])["acceptance_by_level"] == want
    doubled = [one | {name: 2 * one[name] for name in ("reached", "accepted")} for one in want]
    assert summary([step, step])["acceptance_by_level"] == doubled


def test_a_trace_is_summed_up_by_reason():
    decisions = [
        Decision(Reason.GAIN, (), 0.5, 0.1, 0.2, 0.3, 0.5, 4.0, 0.25),
        Decision(Reason.GAIN, (), 0.3, 0.1, 0.2, 0.3, 0.5, 4.0, 0.75),
        Decision(Reason.NO_GAIN, (), None, 0.0, 0.2, 0.3, 0.5, 1.0, 0.0),
        Decision(Reason.NO_GAIN),
        None,
    ]
    steps = [DraftTrace((), (), (), (), 1, decision=decision) for decision in decisions]
    assert summary(steps)["decisions"] == {
        "gain": {"steps": 2, "predicted_gain": 0.5, "price": pytest.approx(0.4)},
        "no_gain": {"steps": 2, "predicted_gain": 0.0},
    }
    assert summary([]) == {}


def test_every_drafted_token_of_a_mixed_draft_names_its_source():
    with serve(replace(FakeEngine(), sources=("suffix", "draft_model"))) as served:
        extra = {"speculation": {"trace": True}}
        *chunks, last = chat(served.client(), stream=True, extra_body=extra, max_tokens=2)
        [step] = chunks[1].choices[0].model_extra["outdraft"]["steps"]
        assert step["source"] == "suffix"
        assert [token["source"] for token in step["drafted"]] == ["suffix", "draft_model"]
        report = last.model_extra["metrics"]["speculative_decoding"]
        assert report["drafted_by_source"] == {"suffix": 1, "draft_model": 1}
        assert report["accepted_by_source"] == {"suffix": 1, "draft_model": 0}


def called(calls) -> list[tuple[str, str]]:
    """Names and arguments of calls, or of what a stream says of them: the name comes first, with
    the id; then pieces of the arguments alone."""
    told: list[list[str]] = []
    for place, call in enumerate(calls):
        index = getattr(call, "index", place)
        if index == len(told):
            assert call.id
            assert call.type == "function"
            told.append([call.function.name, call.function.arguments])
        else:
            assert (call.id, call.type, call.function.name) == (None, None, None)
            told[index][1] += call.function.arguments
    return [(name, arguments) for name, arguments in told]


def test_calls_are_told_apart_from_text():
    with serve(with_script(f"Let me see.\n{CALL}\n{CALL}"), tool_call_parser="hermes") as served:
        client = served.client()
        answer = chat(client, tools=[TOOL])
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me see."
        first, second = choice.message.tool_calls
        assert first.function.name == "weather"
        assert json.loads(first.function.arguments) == {"city": "Köln"}
        assert first.id != second.id
        assert '"name": "weather"' in prompt_of(served)

        text, deltas, reasons = "", [], []
        for chunk in chat(client, tools=[TOOL], stream=True):
            [choice] = chunk.choices
            text += choice.delta.content or ""
            reasons.append(choice.finish_reason)
            deltas += choice.delta.tool_calls or []
        assert text == "Let me see."
        assert called(deltas) == called([first, second])
        assert len({call.id for call in deltas if call.id}) == 2
        assert [reason for reason in reasons if reason] == ["tool_calls"]


def test_a_call_alone_has_no_content():
    script = '{"name": "weather", "parameters": {"city": "Rome"}}'
    with serve(with_script(script), tool_call_parser="llama3_json") as served:
        message = chat(served.client(), tools=[TOOL]).choices[0].message
        assert message.content is None
        assert message.tool_calls[0].function.arguments == '{"city": "Rome"}'


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "weather"}}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_must_call_writes_bare_json(choice, stream):
    other = {"type": "function", "function": {"name": "other"}}
    with serve(with_script('{"name": "weather", "arguments": {}}')) as served:
        tools = [TOOL, other]
        answer = chat(served.client(), tools=tools, tool_choice=choice, stream=stream)
        if stream:
            calls = [c for chunk in answer for c in chunk.choices[0].delta.tool_calls or []]
        else:
            calls = answer.choices[0].message.tool_calls
            assert answer.choices[0].finish_reason == "tool_calls"
        assert called(calls) == [("weather", "{}")]
        schema = json.loads(params_of(served).structured.text)
        names = [call["properties"]["name"] for call in schema.get("items", schema)["anyOf"]]
        expected = ["weather", "other"] if choice == "required" else ["weather"]
        assert names == [{"const": name} for name in expected]


@pytest.mark.parametrize(
    ("script", "name", "arguments"),
    [
        ('{"name":"weather","arguments":{"city":"Ro', "weather", '{"city":"Ro'),
        ('{"name":"weather","arguments":', "weather", ""),
        ('{"name":"wea', "weather", ""),
        ('{"name":"ot', "other", ""),
        ('{"name":"o', "o", ""),
        ('{"na', "", ""),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_forced_call_that_is_cut_short_is_a_call(script, name, arguments, stream):
    others = [{"type": "function", "function": {"name": name}} for name in ("other", "off")]
    with serve(with_script(script + "~~")) as served:
        size = len(served.engine.inputs.tokenizer.encode(script).ids)
        options = {"tools": [TOOL, *others], "tool_choice": "required", "max_tokens": size}
        answer = chat(served.client(), stream=stream, **options)
        choices = [chunk.choices[0] for chunk in answer] if stream else answer.choices
        messages = [choice.delta if stream else choice.message for choice in choices]
        calls = [call for message in messages for call in message.tool_calls or ()]
        assert called(calls) == [(name, arguments)]
        assert choices[-1].finish_reason == "length"
        assert not any(message.content for message in messages)


@pytest.mark.parametrize(
    ("script", "written"),
    [
        ('{"name":"weather","arguments":{"city":"Ro', """weather [('arguments', '{"city":"Ro')]"""),
        ('{"name":"weather","arguments":', "weather []"),
        ('{"name":"wea', "weather []"),
        (
            r'{"name":"weather","arguments":{"city":"\ud800"}}',
            """weather [('arguments', '{"city":"\\\\ud800"}')]""",
        ),
    ],
)
def test_a_call_that_was_cut_short_can_be_sent_back(script, written):
    with serve(with_script(script + "~~")) as served:
        client = served.client()
        size = len(served.engine.inputs.tokenizer.encode(script).ids)
        answer = chat(client, tools=[TOOL], tool_choice="required", max_tokens=size)
        message = answer.choices[0].message
        call = message.tool_calls[0]
        result = {"role": "tool", "tool_call_id": call.id, "content": "cut"}
        chat(client, messages=[*HELLO, message.model_dump(), result], max_tokens=1)
        assert f"<assistant>[{written}" in prompt_of(served)


@pytest.mark.parametrize("stream", [False, True])
def test_only_one_call_is_told_where_several_are_not_wanted(stream):
    with serve(with_script(f"So: {CALL} {CALL}{CALL}"), tool_call_parser="hermes") as served:
        answer = chat(served.client(), tools=[TOOL], parallel_tool_calls=False, stream=stream)
        if stream:
            choices = [choice for chunk in answer for choice in chunk.choices]
            messages = [choice.delta for choice in choices]
        else:
            choices = answer.choices
            messages = [choice.message for choice in choices]
        calls = [call for message in messages for call in message.tool_calls or ()]
        assert called(calls) == [("weather", '{"city": "Köln"}')]
        assert "".join(message.content or "" for message in messages) == "So:"
        assert choices[-1].finish_reason == "tool_calls"


@pytest.mark.parametrize("is_special", [False, True])
def test_calls_between_special_tokens_are_seen(is_special):
    texts = Tokenizer.from_str(tokenizer().to_str())
    tags = ["<tool_call>", "</tool_call>"]
    (texts.add_special_tokens if is_special else texts.add_tokens)(tags)
    with serve(FakeEngine(fake_inputs(texts)), tool_call_parser="hermes") as served:
        client = served.client()
        chat(client, tools=[TOOL])
        assert params_of(served).skip_special_tokens is not is_special
        chat(client, tools=[TOOL], tool_choice="none")
        assert params_of(served).skip_special_tokens


def test_tool_choice_none_hides_the_tools():
    with serve(with_script(CALL), tool_call_parser="hermes") as served:
        answer = chat(served.client(), tools=[TOOL], tool_choice="none")
        assert answer.choices[0].message.content == CALL
        assert "tools" not in prompt_of(served)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"tools": [TOOL]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        (
            {
                "tools": [TOOL],
                "tool_choice": {"type": "function", "function": {"name": "other"}},
            },
            "tool_choice",
        ),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "extra_body": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": -1}, "max_completion_tokens"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, "messages"),
        ({"extra_body": {"speculation": {"enabled": "no"}}}, "speculation.enabled"),
        ({"extra_body": {"best_of": 2}}, "best_of"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, options, field):
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **options)
    assert caught.value.param == field


def test_content_that_is_no_text_is_named(client):
    messages = [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]
    with pytest.raises(openai.BadRequestError, match="input_audio"):
        chat(client, messages=messages)


def test_a_model_without_template_cannot_chat():
    with (
        serve(with_script("x"), template=None) as served,
        pytest.raises(openai.BadRequestError, match="chat template"),
    ):
        chat(served.client())
