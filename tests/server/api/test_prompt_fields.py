"""Fields of vLLM's requests that say what the prompt is, sent by OpenAI's own client."""

from functools import partial

import openai
import pytest

from tests.engine.byte_level import tokenizer, with_start_token
from tests.server.api.fake_engine import MAX_MODEL_LEN, FakeEngine, fake_inputs
from tests.server.api.serving import MODEL, serve

TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.reasoning_content %}({{ message.reasoning_content }}){% endif %}"
    "{{ message.content }}</end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
    "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
    "{% if reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]
STARTED = [*HELLO, {"role": "assistant", "content": "the cat "}]


@pytest.fixture(scope="module")
def served():
    with serve(FakeEngine(), TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def client(served):
    return served.client()


def chat(client, messages=HELLO, **extra):
    return client.chat.completions.create(model=MODEL, messages=messages, extra_body=extra)


def complete(client, prompt, **extra):
    return client.completions.create(model=MODEL, prompt=prompt, extra_body=extra)


def prompt_of(served):
    return served.engine.requests[-1][0]


def text_of(served) -> str:
    return tokenizer().decode(prompt_of(served).token_ids.tolist(), False)


def refused(call) -> openai.BadRequestError:
    with pytest.raises(openai.BadRequestError) as caught:
        call()
    return caught.value


def test_variables_reach_the_template(client, served):
    chat(client, chat_template_kwargs={"enable_thinking": False}, reasoning_effort="low")
    assert text_of(served) == "<user>hi</end><assistant>[thinking False][effort low]"


def test_a_parameter_of_its_own_is_no_variable(client):
    error = refused(lambda: chat(client, chat_template_kwargs={"messages": []}))
    assert error.param == "chat_template_kwargs"
    assert "'messages'" in error.message


def test_openais_own_field_for_the_effort_reaches_the_template(client, served):
    client.chat.completions.create(model=MODEL, messages=HELLO, reasoning_effort="high")
    assert text_of(served).endswith("[effort high]")


def test_so_does_the_effort_of_a_response(client, served):
    client.responses.create(model=MODEL, input="hi", reasoning={"effort": "low", "summary": "auto"})
    assert text_of(served).endswith("[effort low]")
    client.responses.create(model=MODEL, input="hi", reasoning={})
    assert "effort" not in text_of(served)


def test_a_call_that_was_added_up_from_a_stream_can_be_sent_back(client, served):
    function = {"name": "f", "arguments": "{}"}
    call = {"index": 0, "id": "call_1", "type": "function", "function": function}
    turn = {"role": "assistant", "content": "yes", "tool_calls": [call]}
    chat(client, [*HELLO, turn, {"role": "tool", "tool_call_id": "call_1", "content": "5"}])
    assert text_of(served) == "<user>hi</end><assistant>yes</end><tool>5</end><assistant>"


def test_the_generation_prompt_can_be_left_out(client, served):
    chat(client, add_generation_prompt=False)
    assert text_of(served) == "<user>hi</end>"


def test_the_last_message_can_be_continued(client, served):
    chat(client, STARTED, continue_final_message=True)
    assert text_of(served) == "<user>hi</end><assistant>the cat "
    chat(client, STARTED, continue_final_message=True, add_generation_prompt=False)
    assert text_of(served) == "<user>hi</end><assistant>the cat "


def test_a_prompt_ends_in_one_way_only(client):
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert refused(lambda: chat(client, STARTED, **both)).param == "add_generation_prompt"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_earlier_thoughts_reach_the_template(client, served, name):
    chat(client, [*HELLO, {"role": "assistant", "content": "yes", name: "hm"}, *HELLO])
    assert "<assistant>(hm)yes</end>" in text_of(served)


def test_a_long_prompt_is_cut_to_its_last_tokens(client, served):
    ids = list(range(5, 25))
    complete(client, ids, truncate_prompt_tokens=3)
    assert prompt_of(served).token_ids.tolist() == ids[-3:]
    complete(client, "the cat sat on the mat", truncate_prompt_tokens=3)
    assert (
        prompt_of(served).token_ids.tolist()
        == tokenizer().encode("the cat sat on the mat").ids[-3:]
    )
    chat(client, truncate_prompt_tokens=2)
    whole = tokenizer().encode("<user>hi</end><assistant>").ids
    assert prompt_of(served).token_ids.tolist() == whole[-2:]


def test_a_prompt_can_be_cut_to_what_leaves_room_for_the_output(client, served):
    ids = [7] * (2 * MAX_MODEL_LEN)
    complete(client, ids, truncate_prompt_tokens=-1, max_tokens=10)
    assert len(prompt_of(served).token_ids) == MAX_MODEL_LEN - 10


@pytest.mark.parametrize("number", [0, -2, MAX_MODEL_LEN + 1])
def test_no_prompt_is_cut_to_nothing_or_to_more_than_the_model_reads(client, number):
    error = refused(lambda: complete(client, "the cat", truncate_prompt_tokens=number))
    assert error.param == "truncate_prompt_tokens"


def test_special_tokens_are_added_where_they_are_asked_for():
    hi, ours = tokenizer().encode("hi").ids, with_start_token()
    with serve(FakeEngine(inputs=fake_inputs(ours)), "{{ messages[0].content }}") as served:
        client = served.client()
        found = []
        for ask in (lambda **extra: complete(client, "hi", **extra), partial(chat, client)):
            for extra in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
                ask(**extra)
                found.append(prompt_of(served).token_ids.tolist())
    assert found == [[0, *hi], [0, *hi], hi, hi, [0, *hi], hi]


def test_tokenize_writes_a_conversation_as_chat_does(client, served):
    fields = {"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": True}}
    chat(client, STARTED, **fields)
    reply = served.post("/tokenize", json={"messages": STARTED} | fields)
    assert reply.json()["tokens"] == prompt_of(served).token_ids.tolist()


def test_the_request_id_is_part_of_the_answers_id(client, served):
    assert chat(client, request_id="mine-1").id == "chatcmpl-mine-1"
    assert complete(client, "hi", request_id="mine-2").id == "cmpl-mine-2"
    body = {"model": MODEL, "input": "hi", "request_id": "mine-3"}
    assert served.post("/v1/responses", json=body).json()["id"] == "resp_mine-3"


@pytest.mark.parametrize("name", ["", "two words", "a\nb", "é", "a" * 257])
def test_a_request_id_is_fit_for_a_line_of_a_log(client, name):
    assert refused(lambda: chat(client, request_id=name)).param == "request_id"


def test_the_salt_goes_with_the_prompt(client, served):
    chat(client, cache_salt="secret")
    assert prompt_of(served).cache_salt == "secret"
    complete(client, "hi", cache_salt="secret")
    assert prompt_of(served).cache_salt == "secret"
    complete(client, "hi")
    assert prompt_of(served).cache_salt is None
    assert refused(lambda: complete(client, "hi", cache_salt="")).param == "cache_salt"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_context_holds_are_refused_by_name(client, served, name):
    num_prompt = len(tokenizer().encode("<user>hi</end><assistant>").ids)
    chat(client, **{name: MAX_MODEL_LEN - num_prompt})
    error = refused(lambda: chat(client, **{name: MAX_MODEL_LEN - num_prompt + 1}))
    assert error.param == name
    assert error.code == "context_length_exceeded"
    assert f"the prompt has {num_prompt} tokens" in error.message


def test_the_other_routes_refuse_them_too(client, served):
    error = refused(lambda: complete(client, [7] * 5, max_tokens=MAX_MODEL_LEN - 4))
    assert error.param == "max_tokens"
    body = {"model": MODEL, "input": "hi", "max_output_tokens": MAX_MODEL_LEN}
    reply = served.post("/v1/responses", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "max_output_tokens")


def test_tokens_that_nobody_asked_for_are_not_too_many(client):
    complete(client, [7] * (MAX_MODEL_LEN - 2))  # 16 would be the default
