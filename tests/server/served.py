"""A server as users start it: `outdraft serve` in a process of its own."""

import os
import re
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.server.process.engines import processes

LONG = {"prompt": "def add(a, b):", "temperature": 0, "ignore_eos": True}
START_S = 240  # a process that imports torch, on a busy machine
ANSWER_S = 240  # without a word of an answer, on a busy machine


@dataclass
class Server:
    process: subprocess.Popen[str]
    url: str
    log: Path
    verify: ssl.SSLContext | bool = True

    @property
    def engine(self) -> int:
        [pid] = processes(self.process.pid)
        return pid

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, verify=self.verify)

    def complete(self, **body: Any) -> httpx.Response:
        return httpx.post(self.url + "/v1/completions", json=LONG | body, timeout=ANSWER_S)

    @contextmanager
    def stream(self, **body: Any) -> Iterator[Iterator[str]]:
        body = LONG | {"stream": True} | body
        url = self.url + "/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=ANSWER_S) as response:
            yield (line for line in response.iter_lines() if line.startswith("data: "))

    def metrics(self) -> dict[str, float]:
        """Values by name and labels, without the model's."""
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                labels = {k: v for k, v in sample.labels.items() if k != "model_name"}
                key = sample.name.removeprefix("outdraft:")
                values[f"{key}{labels}" if labels else key] = sample.value
        return values

    def wait(self) -> int:
        return self.process.wait(timeout=30)

    def stop(self) -> int:
        """Ask it to end as an operator does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()


@contextmanager
def serving(folder: Path, *flags: str, verify: ssl.SSLContext | bool = True) -> Iterator[Server]:
    """`outdraft serve` with these flags on a free port, computing on one thread.

    `verify`: of httpx, for a server with TLS.
    """
    log = folder / "log"
    command = [sys.executable, "-m", "outdraft.cli", "serve", "--port", "0", *flags]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(command, stderr=file, text=True, env=environ)
    try:
        deadline_s = time.monotonic() + START_S
        while not (found := re.search(r"serving \S+ at (https?://\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline_s, log.read_text()
            time.sleep(0.05)
        server = Server(process, found[1], log, verify)
        wait_for(lambda: server.get("/health").status_code == 200)
        yield server
    finally:
        process.kill()
        process.wait()


def wait_for(is_true: Callable[[], bool], seconds: float = 60.0) -> None:
    """Until a condition holds; connections that are refused count as not yet."""
    deadline_s = time.monotonic() + seconds
    while True:
        with suppress(httpx.TransportError):
            if is_true():
                return
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.05)
