"""Who may come in, how long they may take, and what they are told who come in vain."""

import json
import logging
import socket
import urllib.error
import urllib.request
from contextlib import contextmanager
from urllib.parse import urlsplit

import openai
import pytest

from outdraft.core.errors import EngineDeadError
from outdraft.server.launcher import bounded_http
from tests.server.api.fake_engine import FakeEngine
from tests.server.api.serving import MODEL, serve

SOON_S, LATE_S = 0.3, 60.0  # time limits of the server
ANSWER_S = 60  # after which a test fails


@contextmanager
def connected(url: str):
    with socket.create_connection(("127.0.0.1", urlsplit(url).port), ANSWER_S) as connection:
        yield connection


def read_to_the_end(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
WHOLE = b'{"prompt": "a", "max_tokens": 1}'
JSON = b"Content-Type: application/json\r\n"
COMPLETE = HEAD + JSON + b"Content-Length: %d\r\n\r\n" % len(WHOLE) + WHOLE


@pytest.mark.parametrize(
    ("sent", "limits", "part"),
    [
        (HEAD, (SOON_S, LATE_S), "headers"),
        (HEAD + JSON + b"Content-Length: 100\r\n\r\n", (LATE_S, SOON_S), "body"),
        (HEAD + JSON + b"Content-Length: 100\r\n\r\n" + b"{", (LATE_S, SOON_S), "body"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n", (LATE_S, SOON_S), "body"),
    ],
)
def test_a_request_that_stops_half_way_is_told_so_and_closed(sent, limits, part):
    engine = FakeEngine()
    with serve(engine, http=bounded_http(*limits)) as served, connected(served.url) as connection:
        connection.sendall(sent)
        head, _, body = read_to_the_end(connection).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408 ")
    error = json.loads(body)["error"]
    assert error["code"] == "request_timeout"
    assert f"the request's {part} did not arrive within 0.3 s" in error["message"]
    assert engine.started == []


def test_a_connection_that_sends_nothing_is_closed_without_a_word():
    http = bounded_http(SOON_S, LATE_S)
    with serve(FakeEngine(), http=http) as served, connected(served.url) as connection:
        assert read_to_the_end(connection) == b""


def test_a_second_request_that_stops_half_way_is_closed_too():
    http = bounded_http(SOON_S, LATE_S)
    with serve(FakeEngine(), http=http) as served, connected(served.url) as connection:
        connection.sendall(COMPLETE)
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.sendall(HEAD)
        assert b"HTTP/1.1 408 " in read_to_the_end(connection)


def test_a_request_sent_with_the_one_before_it_has_the_same_limit_for_its_body():
    http = bounded_http(LATE_S, SOON_S)
    half = HEAD + JSON + b"Content-Length: 100\r\n\r\n{"
    with serve(FakeEngine(), http=http) as served, connected(served.url) as connection:
        connection.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n" + half)
        answers = read_to_the_end(connection)
    assert answers.startswith(b"HTTP/1.1 200")
    assert b"HTTP/1.1 408 " in answers


def test_a_slow_sender_of_single_bytes_is_no_exception():
    """The limit is on the whole, not on the gap between two bytes."""
    http = bounded_http(SOON_S, LATE_S)
    with serve(FakeEngine(), http=http) as served, connected(served.url) as connection:
        connection.settimeout(0.05)
        answer = b""
        for letter in HEAD + b"X-Long: " + b"x" * 1000:
            connection.sendall(bytes([letter]))
            try:
                answer = connection.recv(65536)
                break
            except TimeoutError:
                continue
        assert answer.startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_an_answer_may_take_longer_than_a_request():
    """What was sent whole is answered, whatever the limits are; here the engine never answers."""
    engine = FakeEngine(stall_at=0)
    with (
        serve(engine, http=bounded_http(SOON_S, SOON_S)) as served,
        connected(served.url) as connection,
    ):
        connection.sendall(COMPLETE)
        connection.settimeout(4 * SOON_S)
        with pytest.raises(TimeoutError):
            connection.recv(1)


@pytest.mark.parametrize("num_bytes", [10_000, 20_000_000])
@pytest.mark.parametrize("settings", [{"max_body_bytes": 1000}, {"api_key": "secret"}])
def test_an_error_can_be_read_by_a_client_that_is_still_sending(settings, num_bytes):
    """urllib sends all of it before it reads, and asks for the connection to be closed."""
    with serve(FakeEngine(), **settings) as served:
        body = json.dumps({"prompt": "a" * num_bytes}).encode()
        request = urllib.request.Request(
            f"{served.url}/v1/completions", body, {"Content-Type": "application/json"}
        )
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=ANSWER_S)
        with caught.value as reply:
            code = json.loads(reply.read())["error"]["code"]
    expected = (413, "request_too_large") if "max_body_bytes" in settings else None
    assert (reply.code, code) == (expected or (401, "invalid_api_key"))


@pytest.fixture(scope="module")
def on_loopback():
    with serve(FakeEngine(), allowed_hosts=("box.lan", "2001:db8::1")) as running:
        yield running


@pytest.mark.parametrize("path", ["/", "/health", "/v1/models", "/openapi.json"])
@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "2001", "[::1]evil.example"],
)
def test_a_page_whose_name_was_rebound_to_loopback_is_refused(on_loopback, path, host):
    reply = on_loopback.get(path, headers={"Host": host})
    assert reply.status_code == 403
    assert reply.json()["error"]["code"] == "host_not_allowed"
    assert host.removesuffix(":8000") in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "LOCALHOST:8000", "localhost.", "app.localhost", "127.0.0.1:1", "127.1.2.3"),
        *("[::1]", "[::1]:8000", "box.lan", "Box.Lan:80"),
        *("[2001:db8::1]", "[2001:DB8::1]:8000"),
    ],
)
def test_loopback_names_and_those_that_were_allowed_are_served(on_loopback, host):
    assert on_loopback.get("/health", headers={"Host": host}).status_code == 200


def test_without_a_list_any_name_is_served(served):
    assert served.get("/health", headers={"Host": "any.example"}).status_code == 200


def test_a_dead_engines_end_is_in_the_error():
    how = "its process was ended by SIGKILL"
    with serve(FakeEngine(is_alive=False, ended_by=how)) as served:
        with pytest.raises(openai.InternalServerError, match=how):
            served.client().completions.create(model=MODEL, prompt="a")
        assert how in served.get("/health").json()["error"]["message"]
    dying = FakeEngine(error=EngineDeadError("private", how), fail_at=2)
    with serve(dying) as served, pytest.raises(openai.APIError, match=how):
        list(served.client().completions.create(model=MODEL, prompt="a", stream=True))


def test_a_request_keeps_the_id_that_it_came_with(served, client):
    headers = {"X-Request-Id": "trace-7:a/b"}
    raw = client.completions.with_raw_response.create(
        model=MODEL, prompt="a", extra_headers=headers
    )
    assert raw.request_id == "trace-7:a/b"
    stream = {"prompt": "a", "stream": True}
    assert served.post("/v1/completions", json=stream, headers=headers).headers["x-request-id"] == (
        "trace-7:a/b"
    )
    assert served.get("/nothing", headers=headers).headers["x-request-id"] == "trace-7:a/b"


def test_a_request_without_an_id_gets_one_of_its_own(client):
    first, second = (client.completions.create(model=MODEL, prompt="a") for _ in range(2))
    assert first._request_id
    assert first._request_id != second._request_id


@pytest.mark.parametrize("given", ["", "a b", "x" * 257, "\xe9"])
def test_an_id_that_could_not_be_logged_is_replaced(served, given):
    headers = {"X-Request-Id": given.encode("latin-1")}
    told = served.get("/health", headers=headers).headers["x-request-id"]
    assert told != given
    assert len(told) == 32


def test_an_error_that_nobody_expected_has_the_id_too():
    with serve(FakeEngine(error=ZeroDivisionError())) as served:
        body, headers = {"prompt": "a"}, {"X-Request-Id": "x1"}
        reply = served.post("/v1/completions", json=body, headers=headers)
    assert (reply.status_code, reply.headers["x-request-id"]) == (500, "x1")


@pytest.mark.parametrize("logs", [False, True])
def test_requests_are_logged_when_asked_for_and_never_their_texts(caplog, logs):
    with caplog.at_level(logging.INFO, "outdraft"), serve(FakeEngine(), log_requests=logs) as one:
        one.post("/v1/completions", json={"prompt": "secret"}, headers={"X-Request-Id": "r1"})
        one.post("/v1/completions", json={"prompt": "secret", "n": 0})
    lines = [r for r in caplog.records if r.name == "outdraft.server.api.middleware"]
    if not logs:
        assert lines == []
        return
    # A request is logged when its connection is done with it: the next one may be faster.
    lines.sort(key=lambda record: record.fields["status"])
    assert [record.fields["status"] for record in lines] == [200, 400]
    assert lines[0].fields["request_id"] == "r1"
    assert "POST /v1/completions: 200" in lines[0].getMessage()
    assert "secret" not in "".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("path", ["/llm/v1/models", "/v1/models"])
def test_a_prefix_that_a_proxy_takes_off_may_also_stay(path):
    with serve(FakeEngine(), root_path="/llm") as served:
        assert served.get(path).json()["data"][0]["id"] == MODEL
        assert served.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
