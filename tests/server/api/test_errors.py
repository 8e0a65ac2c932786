"""Whatever goes wrong, the reply has OpenAI's shape and tells nothing that it should not."""

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import httpx
import openai
import pytest
from pydantic import ValidationError

from outdraft.core.errors import CapacityError, EngineDeadError, GenerationError, RequestError
from outdraft.server.api.bodies import CompletionRequest
from outdraft.server.api.fields import MAX_ERRORS
from tests.server.api.fake_engine import MAX_MODEL_LEN, FakeEngine
from tests.server.api.serving import MODEL, serve

PATHS = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize"]


@contextmanager
def failing(engine: FakeEngine, error: Exception, fail_at: int = 0) -> Iterator[None]:
    engine.error, engine.fail_at = error, fail_at
    try:
        yield
    finally:
        engine.error = None


def error_of(reply: httpx.Response) -> dict:
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"5",
        b"null",
        b"\xff",
        b'{"prompt": "\\ud800"}',
        b'{"\\ud800": 1}',
        b'{"prompt": NaN}',
        b'{"prompt": 1e999}',
        b'{"prompt":' + b"[" * 100_000,
        b'{"prompt": ' + b"1" * 5000 + b"}",
        b"{}",
    ],
)
def test_a_body_that_is_no_request_is_a_bad_request(served, path, content):
    reply = served.post(path, content=content, headers={"Content-Type": "application/json"})
    assert reply.status_code == 400
    assert error_of(reply)["type"] == "invalid_request_error"


def test_a_body_of_another_type_is_a_bad_request(served):
    reply = served.post("/v1/completions", content=b'{"prompt": "a"}')
    assert reply.status_code == 400
    assert "application/json" in error_of(reply)["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "temperature": "hot"}, "temperature"),
        ({"prompt": "a", "temperature": "1"}, "temperature"),
        ({"prompt": "a", "max_tokens": True}, "max_tokens"),
        ({"prompt": "a", "max_tokens": 2.5}, "max_tokens"),
        ({"prompt": "a", "top_k": 2**70}, "top_k"),
        ({"prompt": "a", "priority": 2**63}, "priority"),
        ({"prompt": "a", "stop": ["a", 5]}, "stop[1]"),
        ({"prompt": "a", "temprature": 1}, "temprature"),
        ({"prompt": "a", "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"prompt": [[1], ["a"]]}, "prompt[1][0]"),
        (
            {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.name",
        ),
    ],
)
def test_the_field_that_is_wrong_is_named(served, body, param):
    reply = served.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert error_of(reply)["param"] == param
    assert param in error_of(reply)["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            {"prompt": 5},
            "prompt: Input should be a valid string or a valid list",
        ),
        (
            {"prompt": ["a", [5]]},
            "prompt[0]: Input should be a valid integer or a valid list",
        ),
        (
            {"prompt": "a", "stop": 5},
            "stop: Input should be a valid string or a valid list",
        ),
        (
            {"prompt": "a", "speculation": 5},
            "speculation: Input should be an object",
        ),
        (
            {"prompt": "a", "response_format": {}},
            "response_format.type: Field required",
        ),
        (
            {"prompt": "a", "temprature": 1},
            "temprature: this field is unknown or not supported: did you mean 'temperature'?",
        ),
        (
            {"prompt": "a", "xyzzy": 1},
            "xyzzy: this field is unknown or not supported",
        ),
    ],
)
def test_what_a_field_may_be_is_said(served, body, message):
    reply = served.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert error_of(reply)["message"] == message


HI = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("path", "body", "hint"),
    [
        ("/v1/chat/completions", {"message": [HI]}, "messages"),
        ("/v1/chat/completions", {"messages": [HI], "cache_prompt": True}, None),
        ("/v1/chat/completions", {"messages": [HI | {"id": "a"}]}, None),
        ("/v1/chat/completions", {"messages": [HI | {"message": "a"}]}, None),
        ("/v1/chat/completions", {"messages": [HI | {"contents": "a"}]}, "content"),
        (
            "/v1/chat/completions",
            {"messages": [HI | {"content": [{"type": "text", "text": "a", "tex": 1}]}]},
            "text",
        ),
        ("/v1/chat/completions", {"messages": [HI], "stream_options": {"stream": True}}, None),
        ("/v1/completions", {"prompt": "a", "structured_outputs": {"jso": {}}}, "json"),
        ("/v1/responses", {"input": [HI | {"rol": "a"}]}, "role"),
        ("/v1/responses", {"input": "a", "text": {"verbsity": "low"}}, "verbosity"),
        ("/tokenize", {"messages": [HI], "add_special_token": True}, "add_special_tokens"),
    ],
)
def test_a_name_is_proposed_only_where_it_may_stand(served, path, body, hint):
    reply = served.post(path, json=body)
    assert reply.status_code == 400
    if path == "/v1/chat/completions" and "message" in body:  # it lacks messages, too
        reply = served.post(path, json=body | {"messages": [HI]})
    found = error_of(reply)
    assert found["code"] == "unknown_parameter"
    assert found["message"].endswith(f"did you mean {hint!r}?" if hint else "not supported")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ({}, "missing_required_parameter"),
        ({"prompt": "a", "response_format": {}}, "missing_required_parameter"),
        ({"prompt": "a", "xyzzy": 1}, "unknown_parameter"),
        ({"prompt": 5}, "invalid_type"),
        ({"prompt": "a", "max_tokens": 2.5}, "invalid_type"),
        ({"prompt": "a", "temperature": "1"}, "invalid_type"),
        ({"prompt": "a", "temperature": -1}, "invalid_value"),
        ({"prompt": "a", "request_id": ""}, "invalid_value"),
        ({"prompt": "a", "response_format": {"type": "xml"}}, "invalid_value"),
        ({"prompt": "a", "use_beam_search": True}, "unsupported_value"),
    ],
)
def test_what_is_wrong_has_openais_name(served, body, code):
    assert error_of(served.post("/v1/completions", json=body))["code"] == code


@pytest.mark.parametrize("method", ["chat", "text", "ids", "response"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_can_tell_that_a_prompt_is_too_long(client, method, stream):
    words, ids = "word " * MAX_MODEL_LEN, [7] * MAX_MODEL_LEN
    ask, named = {
        "chat": (client.chat.completions.create, {"messages": [HI | {"content": words}]}),
        "text": (client.completions.create, {"prompt": words}),
        "ids": (client.completions.create, {"prompt": ids}),
        "response": (client.responses.create, {"input": words}),
    }[method]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(model=MODEL, stream=stream, **named)
    error = caught.value
    assert (error.code, error.type) == ("context_length_exceeded", "invalid_request_error")
    assert error.param == next(iter(named))
    assert f"This model's maximum context length is {MAX_MODEL_LEN} tokens" in error.message


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_client_can_tell_that_prompt_and_answer_are_too_long_together(served, path):
    key, limit = {
        "/v1/chat/completions": ("messages", "max_completion_tokens"),
        "/v1/completions": ("prompt", "max_tokens"),
        "/v1/responses": ("input", "max_output_tokens"),
    }[path]
    body = {key: [HI] if key == "messages" else "hi", limit: MAX_MODEL_LEN}
    error = error_of(served.post(path, json=body))
    assert (error["code"], error["param"]) == ("context_length_exceeded", limit)
    assert f"maximum context length is {MAX_MODEL_LEN} tokens" in error["message"]


def test_openais_client_raises_its_own_errors_with_their_codes():
    engine = FakeEngine(error=CapacityError("full"))
    with serve(engine, api_key="right") as served:
        client = served.client()
        ask = client.completions.create
        with pytest.raises(openai.RateLimitError) as caught:
            ask(model=MODEL, prompt="a")
        assert caught.value.code == "rate_limit_exceeded"
        with pytest.raises(openai.NotFoundError) as caught:
            ask(model="other", prompt="a")
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.NotFoundError) as caught:
            client.models.retrieve("other")
        assert caught.value.code == "model_not_found"
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key="wrong").models.list()
        assert caught.value.code == "invalid_api_key"
        with pytest.raises(openai.BadRequestError) as caught:
            ask(model=MODEL, prompt="a", extra_body={"xyzzy": 1})
        assert (caught.value.code, caught.value.param) == ("unknown_parameter", "xyzzy")


def test_openais_client_raises_what_fails_in_mid_stream_with_its_code(served, client):
    with (
        failing(served.engine, CapacityError("full"), fail_at=2),
        pytest.raises(openai.APIError) as caught,
    ):
        list(client.completions.create(model=MODEL, prompt="a", stream=True))
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")


def test_a_form_that_asks_for_nothing_is_not_ignored(served):
    for form in ({}, {"json_object": False}, {"regex": None}):
        body = {"prompt": "a", "structured_outputs": form}
        reply = served.post("/v1/completions", json=body)
        assert reply.status_code == 400
        assert error_of(reply)["param"] == "structured_outputs"


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": "a", "max_tokens": 1, "no_such_field": None},
        {"prompt": "a", "max_tokens": 1, "suffix": None, "mm_processor_kwargs": None},
        {"prompt": "a", "max_tokens": 1, "stream_options": {"usage": None}, "stream": True},
        {"prompt": "a", "max_tokens": 1, "structured_outputs": {"regex": "a", "pattern": None}},
    ],
)
def test_null_is_an_absent_field_also_where_the_field_is_unknown(served, body):
    assert served.post("/v1/completions", json=body).status_code == 200


def test_null_is_still_no_prompt(served):
    reply = served.post("/v1/completions", json={"prompt": None})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "prompt")


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "reasoning_effort": "low"}, "reasoning_effort"),
        ({"messages": [], "return_tokens": True}, "return_tokens"),
        ({"messages": 5}, "messages"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ],
)
def test_tokenize_names_the_field_of_the_kind_that_was_sent(served, body, param):
    reply = served.post("/tokenize", json=body)
    assert (reply.status_code, error_of(reply)["param"]) == (400, param)


def test_paths_and_methods_that_do_not_exist_have_the_shape_too(served):
    reply = served.get("/v1/nothing")
    assert (reply.status_code, error_of(reply)["code"]) == (404, "unknown_url")
    reply = served.get("/v1/completions")
    assert (reply.status_code, error_of(reply)["code"]) == (405, "method_not_supported")
    assert reply.headers["allow"] == "POST"


def test_a_body_that_promises_too_much_is_not_read():
    with serve(FakeEngine(), max_body_bytes=1000) as served:
        connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Length", "100000")
        connection.endheaders()
        reply = connection.getresponse()
        assert reply.status == 413
        assert json.loads(reply.read())["error"]["code"] == "request_too_large"
        connection.close()


def test_a_body_that_promises_nothing_is_read_up_to_the_limit():
    with serve(FakeEngine(), max_body_bytes=1000) as served:
        connection = http.client.HTTPConnection(urlsplit(served.url).netloc, timeout=60)
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.endheaders()
        for _ in range(3):  # never the last chunk
            connection.send(b"190\r\n" + b" " * 0x190 + b"\r\n")
        reply = connection.getresponse()
        assert reply.status == 413
        connection.close()
        fits = json.dumps({"prompt": "a"}).ljust(1000).encode()
        headers = {"Content-Type": "application/json"}
        ok = served.post("/v1/completions", content=iter([fits[:500], fits[500:]]), headers=headers)
        assert ok.status_code == 200
        too_long = served.post("/v1/completions", content=fits + b" ", headers=headers)
        assert too_long.status_code == 413


FAILURES = [
    (RequestError("prompt is odd", "prompt"), 400, "invalid_request_error"),
    (CapacityError("the waiting queue is full"), 429, "rate_limit_error"),
    (EngineDeadError("a step failed at /secret/path"), 500, "server_error"),
    (ZeroDivisionError("the prompt was: secret"), 500, "server_error"),
    (GenerationError("the model gave no finite logits"), 500, "server_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS[:3])
@pytest.mark.parametrize(("error", "status", "kind"), FAILURES)
def test_a_request_that_the_engine_refuses_gets_a_status(served, error, status, kind, path, stream):
    key = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}.get(path, "input")
    value = [{"role": "user", "content": "a"}] if key == "messages" else "a"
    with failing(served.engine, error):
        reply = served.post(path, json={key: value, "stream": stream})
    assert reply.status_code == status
    assert error_of(reply)["type"] == kind
    assert "secret" not in reply.text
    assert ("retry-after" in reply.headers) == (status == 429)


@pytest.mark.parametrize(("error", "status", "kind"), FAILURES[2:])
def test_a_failure_in_mid_stream_is_the_streams_last_event(served, client, error, status, kind):
    with failing(served.engine, error, fail_at=2):
        body = {"prompt": "a", "stream": True}
        *events, last, done, end = served.post("/v1/completions", json=body).text.split("\n\n")
        assert len(events) == 2
        assert json.loads(last.removeprefix("data: "))["error"]["type"] == kind
        assert (done, end) == ("data: [DONE]", "")
        assert "secret" not in last
        with pytest.raises(openai.APIError, match=r"engine|internal|logits"):
            list(client.completions.create(model=MODEL, prompt="a", stream=True))


def test_a_failed_responses_stream_ends_with_openais_error_event(served, client):
    with failing(served.engine, EngineDeadError("x"), fail_at=2):
        *_, last = client.responses.create(model=MODEL, input="a", stream=True)
        assert last.type == "error"
        assert last.code == "engine_dead"


def test_a_failure_of_one_prompt_ends_the_others():
    with serve(FakeEngine(error=EngineDeadError("x"), fail_at=3)) as served:
        reply = served.post("/v1/completions", json={"prompt": ["a", "b", "c"]})
        assert reply.status_code == 500
        assert sorted(served.engine.aborted) == sorted(served.engine.started)


def test_a_grammar_that_does_not_compile_is_named_as_the_body_names_it(served):
    with failing(served.engine, RequestError("this is no regular expression", "structured")):
        reply = served.post("/v1/completions", json={"prompt": "a", "regex": "("})
    assert (reply.status_code, error_of(reply)["param"]) == (400, "regex")


def test_a_dead_engine_is_an_error_at_once():
    with serve(FakeEngine(is_alive=False)) as served:
        reply = served.post("/v1/completions", json={"prompt": "a"})
        assert (reply.status_code, error_of(reply)["code"]) == (500, "engine_dead")


def test_a_full_queue_tells_openais_client_to_come_back():
    with serve(FakeEngine(error=CapacityError("full")), retry_after_s=7) as served:
        with pytest.raises(openai.RateLimitError) as caught:
            served.client().completions.create(model=MODEL, prompt="a")
        assert caught.value.response.headers["retry-after"] == "7"


MANY = 100_000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"prompt": ["a", 1] * MANY}, "prompt"),
        ({"prompt": [["a"]] * MANY}, "prompt"),
        ({"prompt": "a", "logit_bias": {f"x{i}": 1 for i in range(MANY)}}, "100 values"),
        ({"prompt": "a"} | {f"x{i}": 1 for i in range(MANY)}, "100 values"),
    ],
)
def test_a_body_that_is_wrong_in_a_million_places_is_refused_without_listing_them(body, named):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate(body)
    assert caught.value.error_count() <= MAX_ERRORS
    with serve(FakeEngine()) as served:
        reply = served.post("/v1/completions", json=body)
    assert reply.status_code == 400
    assert named in error_of(reply)["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"prompt": "a", "bad_words": ["a", "b", "c"]}, "bad_words"),
        ({"prompt": "a", "bad_words": ["abcde"]}, "bad_words"),
        ({"prompt": ["a"] * 5}, "prompt"),
    ],
)
def test_what_would_keep_the_engine_busy_without_a_token_is_bounded(body, param):
    fitting = {"prompt": ["a"] * 4, "bad_words": ["abcd", "b"]}
    with serve(FakeEngine(), max_bad_words=2, max_bad_word_length=4, max_choices=4) as served:
        assert served.post("/v1/completions", json=fitting).status_code == 200
        reply = served.post("/v1/completions", json=body)
    assert (reply.status_code, error_of(reply)["param"]) == (400, param)
