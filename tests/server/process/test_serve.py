"""`outdraft serve` from its start to its end, as a process that is sent signals."""

import json
import os
import signal
import socket
import ssl
import time
from pathlib import Path

import httpx
import psutil
import pytest
import trustme

from outdraft.core.recorded import read_requests
from outdraft.server.launcher import bind
from tests.cli.pair import pair
from tests.server.process.engines import ranks_of
from tests.server.served import START_S, Server, serving, wait_for

pytestmark = pytest.mark.slow

EMBEDDED = ("--speculative-config", "null", "--dtype", "float32")


def is_running(pid: int) -> bool:
    """A process that nobody has waited for yet has ended all the same."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def rest_of_stream(server: Server, hangs_by: signal.Signals) -> list[str]:
    """The lines of a stream behind a signal by which the engine's process hangs."""
    engine = server.engine
    try:
        with server.stream(max_tokens=900, n=16) as lines:
            next(lines)
            os.kill(engine, hangs_by)
            return list(lines)
    except BaseException:
        os.kill(engine, signal.SIGKILL)  # else nothing would ever end it
        raise


def self_signed(folder: Path) -> Path:
    """A certificate for 127.0.0.1; its key lies beside it, as key.pem."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    (folder / "key.pem").write_bytes(issued.private_key_pem.bytes())
    path = folder / "certificate.pem"
    path.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    with path.open("ab") as file:
        file.write(authority.cert_pem.bytes())
    return path


def test_a_sigterm_lets_running_requests_finish_and_refuses_new_ones(tmp_path):
    with serving(tmp_path, *EMBEDDED) as server, server.stream(max_tokens=600, n=4) as lines:
        engine = server.engine
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        refused = server.complete(max_tokens=1)
        rest = list(lines)
        assert server.wait() == 0
    assert refused.status_code == 503
    assert rest[-1] == "data: [DONE]"
    assert sum('"finish_reason":"length"' in line.replace(" ", "") for line in rest) == 4
    assert not is_running(engine)


def test_requests_that_are_not_done_in_time_are_ended(tmp_path):
    flags = (*EMBEDDED, "--drain-timeout", "0.2")
    with serving(tmp_path, *flags) as server, server.stream(max_tokens=900, n=16) as lines:
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
        assert server.wait() == 0
    assert any('"error"' in line for line in rest)


def test_a_server_records_requests_until_its_end(tmp_path):
    """One that finished, one whose reader left, and one that the end of the server cut off."""
    path = tmp_path / "trace.jsonl"
    flags = (*EMBEDDED, "--drain-timeout", "0.2", "--record-trace", str(path))
    with serving(tmp_path, *flags) as server:
        usage = server.complete(max_tokens=20).json()["usage"]
        with server.stream(max_tokens=400, n=16) as lines:
            next(lines)
        wait_for(lambda: len(path.read_bytes().splitlines()) == 2)
        with server.stream(max_tokens=400, n=16) as lines:
            next(lines)
            server.process.send_signal(signal.SIGTERM)
            list(lines)
            assert server.wait() == 0
    requests, is_whole = read_requests(path)
    assert is_whole
    finished, left, cut = requests
    assert len(finished.prompt_token_ids) == usage["prompt_tokens"]
    assert [len(one.token_ids) for one in finished.outputs] == [20]
    assert {one.finish_reason for one in left.outputs} == {"abort"}
    assert {one.finish_reason for one in cut.outputs} == {"error"}
    assert b"def add" not in path.read_bytes()


def test_a_second_signal_ends_everything_at_once(tmp_path):
    with serving(tmp_path, *EMBEDDED) as server, server.stream(max_tokens=900, n=16) as lines:
        next(lines)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGINT)
        assert server.wait() != 0


def test_the_death_of_the_engine_is_told_and_ends_the_server(tmp_path):
    with serving(tmp_path, *EMBEDDED) as server, server.stream(max_tokens=900, n=16) as lines:
        next(lines)
        os.kill(server.engine, signal.SIGKILL)
        rest = list(lines)
        assert server.get("/health").status_code == 503
        assert server.wait() == 1
        assert "the engine has died: its process was ended by SIGKILL" in server.log.read_text()
    assert any('"error"' in line and "SIGKILL" in line for line in rest)


def test_a_server_may_start_another_engine(tmp_path):
    with serving(tmp_path, *EMBEDDED, "--restart-engine") as server:
        before = server.complete(max_tokens=20).json()["choices"]
        os.kill(server.engine, signal.SIGKILL)
        wait_for(lambda: server.get("/health").status_code == 503, START_S)
        wait_for(lambda: server.get("/health").status_code == 200, START_S)
        assert server.complete(max_tokens=20).json()["choices"] == before
        os.kill(server.engine, signal.SIGKILL)
        wait_for(lambda: server.get("/health").status_code == 503, START_S)
        server.process.send_signal(signal.SIGTERM)  # while a third one starts
        assert server.wait() == 1


def test_the_death_of_a_rank_is_told_and_ends_the_server(tmp_path):
    flags = (*EMBEDDED, "--tensor-parallel-size", "2")
    with serving(tmp_path, *flags) as server, server.stream(max_tokens=900, n=16) as lines:
        next(lines)
        [rank] = ranks_of(server.engine)
        rank.kill()
        rest = list(lines)
        assert server.wait() == 1
        assert "rank 1 of 2: its process was ended by SIGKILL" in server.log.read_text()
    assert any('"error"' in line and "rank 1 of 2" in line for line in rest)


@pytest.mark.full
def test_a_server_may_start_another_engine_for_one_whose_rank_hangs(tmp_path):
    flags = (*EMBEDDED, "--tensor-parallel-size", "2", "--rank-timeout", "10", "--restart-engine")
    with serving(tmp_path, *flags) as server:
        before = server.complete(max_tokens=20).json()["choices"]
        engine, [rank] = server.engine, ranks_of(server.engine)
        try:
            with server.stream(max_tokens=900, n=16) as lines:
                next(lines)
                rank.suspend()
                rest = list(lines)
        except BaseException:
            rank.kill()  # else nothing would ever end it
            raise
        assert any('"error"' in line and "its process is stopped" in line for line in rest)
        wait_for(lambda: server.get("/health").status_code == 200, START_S)
        assert server.engine != engine
        assert server.complete(max_tokens=20).json()["choices"] == before
        assert not is_running(rank.pid)


def test_a_rank_0_that_hangs_is_told_and_ends_the_server(tmp_path):
    flags = (*EMBEDDED, "--tensor-parallel-size", "2", "--rank-timeout", "3")
    with serving(tmp_path, *flags) as server:
        engine, [rank] = server.engine, ranks_of(server.engine)
        rest = rest_of_stream(server, signal.SIGSTOP)
        assert server.wait() == 1
        assert "the engine has died: its process was stopped for 3 s" in server.log.read_text()
        assert not is_running(engine)
        wait_for(lambda: not is_running(rank.pid), START_S)
    assert any('"error"' in line and "was stopped for 3 s" in line for line in rest)


def test_a_lone_engine_that_is_stopped_is_told_and_ends_the_server(tmp_path):
    with serving(tmp_path, *EMBEDDED, "--rank-timeout", "2") as server:
        engine = server.engine
        rest = rest_of_stream(server, signal.SIGSTOP)
        assert server.wait() == 1
        assert "the engine has died: its process was stopped for 2 s" in server.log.read_text()
        assert not is_running(engine)
    assert any('"error"' in line and "was stopped for 2 s" in line for line in rest)


ENDLESS = """import os, signal, threading

def loop(_, frame):
    while frame is not None:
        if frame.f_code.co_name == "step":
            while True:
                pass
        frame = frame.f_back
    threading.Timer(0.001, os.kill, (os.getpid(), signal.SIGUSR1)).start()  # again, between steps

signal.signal(signal.SIGUSR1, loop)
"""


@pytest.mark.full
def test_a_rank_0_in_an_endless_loop_is_told_and_ends_the_server(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(ENDLESS)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    flags = (*EMBEDDED, "--tensor-parallel-size", "2", "--rank-timeout", "2")
    with serving(tmp_path, *flags) as server:
        [rank] = ranks_of(server.engine)
        rest = rest_of_stream(server, signal.SIGUSR1)
        assert server.wait() == 1
        log = server.log.read_text()
        assert "rank 0 has stood still in a step for 30 s" in log
        assert "the engine has died: its process stood still in a step" in log
        wait_for(lambda: not is_running(rank.pid), START_S)
    assert any('"error"' in line and "stood still in a step" in line for line in rest)


def test_the_engine_dies_with_a_server_that_is_killed(tmp_path):
    with serving(tmp_path, *EMBEDDED) as server:
        engine = server.engine
        server.process.kill()
        server.process.wait()
        time.sleep(1)
        assert not is_running(engine)


def test_the_embedded_pair_serves_its_first_token_soon_and_needs_no_template(tmp_path):
    with serving(tmp_path) as server:
        assert server.complete(max_tokens=1).status_code == 200
        shown = server.log.read_text()
        assert "loading weights" in shown
        assert "KV cache" in shown
        messages = [{"role": "user", "content": "def add("}, {"role": "user", "content": "a"}]
        body = {"messages": messages, "max_tokens": 4, "temperature": 0}
        chat = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=60)
        assert chat.json()["usage"]["prompt_tokens"] > 0
        assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()
        assert "outdraft:num_requests_running" in server.get("/metrics").text
        assert server.get("/").status_code == 200


def test_the_page_hears_of_latencies_and_of_the_estimate_on_the_metrics_page(tmp_path):
    with serving(tmp_path, *EMBEDDED) as server:
        assert server.complete(max_tokens=20, stream=True).status_code == 200
        name = "outdraft:estimated_tokens_per_second_without_speculation{"

        def estimate() -> float:
            rows = server.get("/metrics").text.splitlines()
            (line,) = [row for row in rows if row.startswith(name)]
            return float(line.split()[-1])

        with httpx.stream("GET", server.url + "/dashboard/events", timeout=30) as events:
            seconds: list[dict[str, float | None]] = []
            for data in events.iter_lines():
                if data.startswith("data: ["):
                    seconds += json.loads(data.removeprefix("data: "))
                # The last step may be counted after its text was sent.
                told = seconds[-1]["plain_tokens_per_s"] if seconds else None
                if len(seconds) > 20 or told == pytest.approx(estimate()):
                    break
        assert seconds[-1]["plain_tokens_per_s"] == pytest.approx(estimate())
        assert any(second["ttft_p50_s"] is not None for second in seconds)
        assert any(second["itl_p50_s"] is not None for second in seconds)


def test_flags_come_from_a_file_too(tmp_path):
    template = tmp_path / "template.jinja"
    template.write_text("{{ bos_token }}{{ messages[0].content }}")
    file = tmp_path / "serve.toml"
    file.write_text(
        f'model = "{pair().chatting}"\nserved-model-name = ["tiny", "other"]\napi-key = "secret"\n'
        f'chat-template = "{template}"\nmax-num-seqs = 2\nspeculative-disable-queue-size = 1\n'
        '[speculative-config]\nmethod = "ngram"\n'
    )
    flags = ("--config", str(file), "--api-key", "stronger", "--log-json")
    with serving(tmp_path, *flags) as server:
        assert server.get("/v1/models").status_code == 401
        headers = {"authorization": "Bearer stronger"}
        models = httpx.get(server.url + "/v1/models", headers=headers).json()
        assert [model["id"] for model in models["data"]] == ["tiny", "other"]
        shown = server.log.read_text().splitlines()
        assert any("Application startup" in json.loads(x)["message"] for x in shown if x[:1] == "{")


def test_https_with_a_key_from_a_file_and_limits_for_half_sent_requests(tmp_path):
    certificate = self_signed(tmp_path)
    (tmp_path / "key").write_text("from a file\n")
    flags = ("--ssl-certfile", certificate, "--ssl-keyfile", tmp_path / "key.pem")
    flags += ("--api-key-file", tmp_path / "key", "--header-timeout", "0.5", "--body-timeout", "60")
    flags += ("--enable-log-requests", "--root-path", "/llm", "--allowed-origins", '["http://a"]')
    trusting = ssl.create_default_context(cafile=certificate)
    with serving(tmp_path, *EMBEDDED, *map(str, flags), verify=trusting) as server:
        assert server.url.startswith("https://127.0.0.1:")
        headers = {"Authorization": "Bearer from a file", "Origin": "http://a", "X-Request-Id": "i"}
        url = server.url + "/llm/v1/models"
        reply = httpx.get(url, headers=headers, verify=trusting)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "http://a"
        assert server.get("/v1/models").status_code == 401
        rebound = httpx.get(url, headers=headers | {"Host": "evil.example"}, verify=trusting)
        assert rebound.status_code == 403
        port = int(server.url.rpartition(":")[2])
        with (
            socket.create_connection(("127.0.0.1", port), 20) as plain,
            trusting.wrap_socket(plain, server_hostname="127.0.0.1") as connection,
        ):
            connection.sendall(b"GET /health HTTP/1.1\r\n")
            assert connection.recv(12) == b"HTTP/1.1 408"
        shown = server.log.read_text()
        assert "GET /llm/v1/models: 200" in shown
        assert "request i" in shown
        assert "WARNING: everybody" not in shown


def test_a_server_for_everybody_warns_and_answers_to_any_name(tmp_path, monkeypatch):
    monkeypatch.delenv("OUTDRAFT_API_KEY", raising=False)
    with serving(tmp_path, *EMBEDDED, "--host", "0.0.0.0") as server:
        assert "WARNING: everybody who can reach 0.0.0.0:" in server.log.read_text()
        reply = httpx.get(server.url + "/health", headers={"Host": "any.example"})
        assert reply.status_code == 200


def test_the_key_comes_from_the_environment_and_goes_no_further(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTDRAFT_API_KEY", "from outside")
    with serving(tmp_path, *EMBEDDED, "--host", "0.0.0.0") as server:
        assert "WARNING: everybody" not in server.log.read_text()
        assert server.get("/v1/models").status_code == 401
        headers = {"Authorization": "Bearer from outside"}
        assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 200
        assert "OUTDRAFT_API_KEY" not in psutil.Process(server.engine).environ()


def test_small_pieces_are_sent_without_delay():
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # what asyncio looks at
