"""`outdraft serve` from its start to its end, as a process that is sent signals."""

import json
import os
import signal
import socket
import time
from pathlib import Path

import httpx
import psutil
import pytest

from outdraft.server.launcher import bind
from tests.cli.pair import pair
from tests.server.served import START_S, serving, wait_for

pytestmark = pytest.mark.slow

EMBEDDED = ("--speculative-config", "null", "--dtype", "float32")


def is_running(pid: int) -> bool:
    """A process that nobody has waited for yet has ended all the same."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


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
    assert any('"error"' in line for line in rest)


def test_a_server_may_start_another_engine(tmp_path):
    with serving(tmp_path, *EMBEDDED, "--restart-engine") as server:
        before = server.complete(max_tokens=20).json()["choices"]
        os.kill(server.engine, signal.SIGKILL)
        time.sleep(1)
        assert server.get("/health").status_code == 503
        wait_for(lambda: server.get("/health").status_code == 200, START_S)
        assert server.complete(max_tokens=20).json()["choices"] == before
        os.kill(server.engine, signal.SIGKILL)
        time.sleep(0.5)
        server.process.send_signal(signal.SIGTERM)  # while a third one starts
        assert server.wait() == 1


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
        (line,) = [row for row in server.get("/metrics").text.splitlines() if row.startswith(name)]
        with httpx.stream("GET", server.url + "/dashboard/events", timeout=30) as events:
            seconds: list[dict[str, float | None]] = []
            for data in events.iter_lines():
                if data.startswith("data: ["):
                    seconds += json.loads(data.removeprefix("data: "))
                if seconds and seconds[-1]["plain_tokens_per_s"] is not None:
                    break
        assert seconds[-1]["plain_tokens_per_s"] == pytest.approx(float(line.split()[-1]))
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


def test_small_pieces_are_sent_without_delay():
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP  # what asyncio looks at
