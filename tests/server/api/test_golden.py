"""Streams byte for byte, as files: a change of the wire format is seen in review.

To write the files anew, delete them and run the tests twice: a missing file is written and fails.
"""

import re
from pathlib import Path

import pytest

from tests.server.api.fake_engine import FakeEngine, default_script
from tests.server.api.serving import serve

GOLDEN = Path(__file__).parent / "golden"
HELLO = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALL = 'I ask. <tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>'
USAGE = {"stream_options": {"include_usage": True}}

STREAMS = {
    "chat": ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 5, "n": 2} | USAGE),
    "chat_logprobs": (
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 1},
    ),
    "chat_trace": (
        "/v1/chat/completions",
        {"messages": HELLO, "max_tokens": 3, "speculation": {"trace": True}},
    ),
    "chat_tools": ("/v1/chat/completions", {"messages": HELLO, "tools": [TOOL]}),
    "completion": ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 3} | USAGE),
    "completion_echo_logprobs": (
        "/v1/completions",
        {"prompt": "the cat", "max_tokens": 2, "echo": True, "logprobs": 1},
    ),
    "completion_stop": ("/v1/completions", {"prompt": "a", "max_tokens": 20, "stop": [" mat"]}),
    "responses": ("/v1/responses", {"input": "hi", "max_output_tokens": 3}),
}


@pytest.fixture(scope="module")
def with_tools():
    with serve(FakeEngine(), tool_call_parser="hermes") as served:
        yield served


def settled(text: str) -> str:
    """Without what differs from run to run."""
    text = re.sub(r'"(chatcmpl-|cmpl-|resp_|msg_|call_)[0-9a-f]{24,32}"', r'"\1ID"', text)
    return re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', text)


@pytest.mark.parametrize("name", STREAMS)
def test_streams_are_what_they_were(with_tools, name):
    path, body = STREAMS[name]
    with_tools.engine.script = (lambda *_: CALL) if "tools" in body else default_script
    reply = with_tools.post(path, json=body | {"stream": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    found = settled(reply.content.decode())
    file = GOLDEN / f"{name}.txt"
    if not file.exists():
        file.write_text(found, "utf-8")
        pytest.fail(f"{file.name} was written: look at it and run again")
    assert found == file.read_text("utf-8")
