"""`outdraft serve` with autoscaling: replicas come with load and leave when it has gone. Those that
leave lose no request in silence."""

import importlib.util
import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import pytest

from tests.server.replicas.cluster import ENVIRON
from tests.server.served import Server, serving, wait_for

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'outdraft[ray]'", allow_module_level=True)

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("ray")]

SCALED_S = 120.0  # Ray Serve asks for a mean of half a minute
FLAGS = (
    *("--ray-address", "local", "--min-replicas", "1", "--max-replicas", "2"),
    *("--target-requests", "4", "--upscale-delay", "1", "--downscale-delay", "1"),
    *("--replica-timeout", "3", "--replica-cpus", "1"),
    *("--kv-cache-memory-bytes", "64Mi", "--max-num-seqs", "8", "--no-enable-prefix-caching"),
)
SHORT = {"max_tokens": 300}
# Far longer than what lies between two requests, so that a replica that leaves has one.
MIDDLE = {"max_tokens": 600, "temperature": 1}
LONG = {"max_tokens": 900, "n": 16, "temperature": 1}  # longer than the drain timeout


@pytest.fixture
def served(request, tmp_path, monkeypatch) -> Iterator[Server]:
    """`request.param`: the drain timeout, in seconds."""
    for name, value in ENVIRON.items():
        monkeypatch.setenv(name, value)
    with serving(tmp_path, *FLAGS, "--drain-timeout", request.param) as server:
        yield server
        assert server.stop() == 0


def has_replicas(server: Server, number: int) -> bool:
    return server.metrics()["replicas"] == number


def streamed(server: Server, **body: Any) -> str:
    """How a stream ended: all of it is there, or its error."""
    with server.stream(**body) as lines:
        *_, last = (json.loads(line[6:]) for line in lines if line != "data: [DONE]")
    return last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"]


def completed(server: Server, **body: Any) -> str:
    reply = server.complete(**body).json()
    return "error" if "error" in reply else reply["choices"][0]["finish_reason"]


@contextmanager
def clients(server: Server, number: int, **body: Any) -> Iterator[dict[str, list[str]]]:
    """So many that stream, and as many that do not, ask one request after the other. How these
    ended, once the clients have left."""
    has_left = Event()
    endings: dict[str, list[str]] = {"streamed": [], "completed": []}

    def ask(one: Any) -> None:
        while not has_left.is_set():
            endings[one.__name__].append(one(server, **body))

    with ThreadPoolExecutor(2 * number) as threads:
        asking = [threads.submit(ask, one) for one in (streamed, completed) for _ in range(number)]
        try:
            yield endings
        finally:
            has_left.set()
    for client in asking:
        client.result()


def leavings(server: Server) -> list[int]:
    """How many requests the replicas had that have left."""
    found = re.findall(r"not needed any more: it has (\d+) requests left", server.log.read_text())
    return [int(number) for number in found]


@pytest.mark.parametrize("served", ["240"], indirect=True)
def test_a_replica_comes_with_load_and_leaves_once_its_requests_have_ended(served):
    assert has_replicas(served, 1)
    with clients(served, 6, **SHORT) as many:
        wait_for(lambda: has_replicas(served, 2), SCALED_S)
    with clients(served, 1, **MIDDLE) as few:  # one replica is enough, but both have requests
        wait_for(lambda: has_replicas(served, 1), SCALED_S)
    assert {ending for one in (many, few) for each in one.values() for ending in each} == {"length"}
    [number] = leavings(served)
    assert number >= 1
    assert served.metrics()["retried_requests_total"] == 0


@pytest.mark.parametrize("served", ["3"], indirect=True)
def test_what_a_replica_cannot_end_in_time_is_computed_again_or_ends_with_an_error(served):
    with clients(served, 6, **SHORT):
        wait_for(lambda: has_replicas(served, 2), SCALED_S)
    with clients(served, 2, **LONG) as few:
        wait_for(lambda: has_replicas(served, 1), SCALED_S)
    assert set(few["completed"]) == {"length"}
    assert set(few["streamed"]) <= {"length", "engine_dead"}
    num_lost = few["streamed"].count("engine_dead")
    num_retried = served.metrics()["retried_requests_total"]
    *_, number = leavings(served)
    assert number >= num_lost + num_retried >= 1
