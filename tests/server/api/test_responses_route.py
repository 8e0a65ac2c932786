"""/v1/responses, asked by OpenAI's own client."""

import openai
import pytest

from tests.server.api.fake_engine import TEXT
from tests.server.api.serving import MODEL

ANSWER = f"{TEXT} 0"


def respond(client, **options):
    return client.responses.create(**{"model": MODEL, "input": "hi", **options})


def test_an_answer_is_a_message_with_a_text(client):
    response = respond(client, instructions="be brief")
    assert response.output_text == ANSWER
    assert response.status == "completed"
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert response.instructions == "be brief"


def test_a_stream_tells_official_events_in_order(client):
    events = list(respond(client, stream=True))
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert set(kinds[4:-4]) == {"response.output_text.delta"}
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(deltas) == ANSWER == events[-1].response.output_text


def test_openais_stream_helper_understands_it(client):
    with client.responses.stream(model=MODEL, input="hi") as stream:
        assert stream.get_final_response().output_text == ANSWER


def test_an_answer_that_was_cut_is_incomplete(client):
    response = respond(client, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"
    assert [e.type for e in respond(client, max_output_tokens=3, stream=True)][-1] == (
        "response.incomplete"
    )


def test_a_conversation_is_written_by_the_template(served, client):
    turns = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"type": "message", "role": "user", "content": "c"},
    ]
    respond(client, input=turns, instructions="s")
    prompt, _, _ = served.engine.requests[-1]
    text = served.engine.inputs.tokenizer.decode(prompt.token_ids.tolist())
    assert text == "<system>s<user>a<assistant>b<user>c<assistant>"


def test_a_response_can_be_sent_back(served, client):
    first = respond(client)
    turns = [*(item.model_dump() for item in first.output), {"role": "user", "content": "c"}]
    assert respond(client, input=turns).status == "completed"


def test_logprobs_are_told_when_included(client):
    include = ["message.output_text.logprobs"]
    response = respond(client, include=include, top_logprobs=2, max_output_tokens=2)
    first, _ = response.output[0].content[0].logprobs
    assert (first.token, first.logprob) == ("the", -2.0)
    assert [top.logprob for top in first.top_logprobs] == [-1.0, -2.0]


def test_the_form_of_the_text_reaches_the_engine(served, client):
    format_ = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
    response = respond(client, text={"format": format_})
    structured = served.engine.requests[-1][1].structured
    assert (structured.kind, structured.text) == ("json_schema", '{"type": "object"}')
    assert response.text.format.schema_ == {"type": "object"}


def test_parameters_reach_the_engine(served, client):
    respond(client, temperature=0.25, top_p=0.5, extra_body={"top_k": 3, "seed": 4, "priority": 2})
    _, params, priority = served.engine.requests[-1]
    assert (params.temperature, params.top_p, params.top_k, params.seed) == (0.25, 0.5, 3, 4)
    assert priority == 2


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"input": []}, "input"),
        ({"input": [{"type": "reasoning"}]}, "input"),
        ({"input": [{"type": "reasoning", "content": "x"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"extra_body": {"n": 2}}, "n"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(client, options, field):
    with pytest.raises(openai.BadRequestError) as caught:
        respond(client, **options)
    assert caught.value.param == field


def test_that_there_are_no_tools_is_said_plainly(client):
    with pytest.raises(openai.BadRequestError, match=r"tools: only \[\] is supported"):
        respond(client, tools=[{"type": "web_search"}])
