"""Streams say something from the first moment on, whatever the engine does meanwhile."""

import json

import pytest

from tests.server.api.fake_engine import FakeEngine, with_script
from tests.server.api.serving import MODEL, serve

HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "weather"}}
ARGUMENTS = '{"city": "Köln", "days": [1, 2], "note": "a \\"b\\" }"}'
BODIES = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
}
ACCEPTED, NEVER = 1, 0  # the update before which the engine waits for ever


def test_the_role_comes_before_the_prompt_is_read():
    with serve(FakeEngine(stall_at=ACCEPTED)) as served:
        stream = served.client().chat.completions.create(model=MODEL, messages=HELLO, stream=True)
        [choice] = next(stream).choices
        assert (choice.delta.role, choice.delta.content, choice.finish_reason) == (
            "assistant",
            "",
            None,
        )
        stream.close()


def test_a_response_is_created_before_the_prompt_is_read():
    with serve(FakeEngine(stall_at=ACCEPTED)) as served:
        stream = served.client().responses.create(model=MODEL, input="hi", stream=True)
        assert [next(stream).type for _ in range(2)] == [
            "response.created",
            "response.in_progress",
        ]
        stream.close()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stall_at", [NEVER, ACCEPTED, 3])
def test_comments_break_the_silence(path, stall_at):
    with serve(FakeEngine(stall_at=stall_at), silence_s=0.01) as served:
        body = BODIES[path] | {"stream": True}
        with served.http.stream("POST", served.url + path, json=body) as reply:
            assert reply.status_code == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            lines: list[str] = []
            for line in reply.iter_lines():
                lines.append(line)
                if lines[-4:] == [":", "", ":", ""]:
                    break
        has_data = any(line.startswith("data:") for line in lines)
        assert has_data == (stall_at == 3 or (stall_at == ACCEPTED and path != "/v1/completions"))


def test_clients_pass_over_comments():
    with serve(FakeEngine(), silence_s=1e-6) as served:
        client = served.client()
        asked = {"model": MODEL, "messages": HELLO}
        whole = client.chat.completions.create(**asked).choices[0].message.content
        stream = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
        told = client.completions.create(model=MODEL, prompt="hi", stream=True)
        assert "".join(chunk.choices[0].text for chunk in told)


SCRIPTS = {
    "hermes": f'So:\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
    "qwen2_5_coder": f'So:\n```json\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n```',
    "llama3_json": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "forced": f'[{{"name":"weather","arguments":{ARGUMENTS}}}]',
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_official_client_puts_streamed_arguments_together(name):
    forced = name == "forced"
    options = {} if forced else {"tool_call_parser": name}
    with serve(with_script(SCRIPTS[name]), **options) as served:
        asked = {"model": MODEL, "messages": HELLO, "tools": [TOOL]}
        if forced:
            asked["tool_choice"] = "required"
        with served.client().chat.completions.stream(**asked) as stream:
            events = list(stream)
            message = stream.get_final_completion().choices[0].message
        [call] = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("weather", ARGUMENTS)
        assert json.loads(ARGUMENTS)["city"] == "Köln"
        kind = "tool_calls.function.arguments.delta"
        pieces = [event.arguments_delta for event in events if event.type == kind]
        assert pieces[0] == ""  # the name comes first
        assert len(pieces) > len(ARGUMENTS) / 4
        assert "".join(pieces) == ARGUMENTS
        whole = served.client().chat.completions.create(**asked).choices[0].message
        assert (whole.content or "") == message.content
        assert whole.tool_calls[0].function.arguments == ARGUMENTS


@pytest.mark.parametrize(("options", "number"), [({}, 2), ({"parallel_tool_calls": False}, 1)])
def test_a_model_that_must_call_may_call_several_times(options, number):
    one, two = ({"name": "weather", "arguments": {"city": city}} for city in ("Rome", "Oslo"))
    script = json.dumps([one, two] if number == 2 else one, separators=(",", ":"))
    with serve(with_script(script)) as served:
        answer = served.client().chat.completions.create(
            model=MODEL, messages=HELLO, tools=[TOOL], tool_choice="required", **options
        )
        [choice] = answer.choices
        cities = [json.loads(call.function.arguments)["city"] for call in choice.message.tool_calls]
        assert cities == ["Rome", "Oslo"][:number]
        schema = json.loads(served.engine.requests[-1][1].structured.text)
        assert (schema.get("type") == "array") == (number == 2)


def test_a_model_whose_template_refuses_two_calls_writes_one():
    template = (
        "{% for m in messages %}{% if m.tool_calls and m.tool_calls | length != 1 %}"
        "{{ raise_exception('one call at once') }}{% endif %}{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endfor %}"
    )
    with serve(with_script('{"name":"weather","arguments":{}}'), template) as served:
        answer = served.client().chat.completions.create(
            model=MODEL, messages=HELLO, tools=[TOOL], tool_choice="required"
        )
        assert len(answer.choices[0].message.tool_calls) == 1
        assert "anyOf" in json.loads(served.engine.requests[-1][1].structured.text)
