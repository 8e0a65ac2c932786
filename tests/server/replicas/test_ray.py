"""`outdraft serve` with a replica on each of two nodes of a Ray cluster: none of its requests is
lost in silence, whatever happens to a replica."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.server.replicas.cluster import ENVIRON, FAR, NEAR, Cluster, two_nodes
from tests.server.served import START_S, Server, serving, wait_for

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'outdraft[ray]'", allow_module_level=True)
if os.geteuid() != 0:
    pytest.skip("network namespaces are root's to make", allow_module_level=True)

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

RECOVERY_S = 240.0
FLAGS = (
    *("--data-parallel-size", "2", "--replica-cpus", "1", "--replica-timeout", "3"),
    *("--max-model-len", "1024", "--kv-cache-memory-bytes", "64Mi", "--max-num-seqs", "8"),
)


@dataclass(frozen=True)
class Served:
    cluster: Cluster
    server: Server

    def num_replicas(self) -> float:
        return self.server.metrics()["replicas"]

    def routed(self) -> dict[str, float]:
        """Requests by replica."""
        counts: dict[str, float] = {}
        for name, value in self.server.metrics().items():
            if name.startswith("routed_requests_total"):
                place = re.search(r"'replica': '(\d+)'", name)[1]
                counts[place] = counts.get(place, 0) + value
        return counts


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch, two_nodes() as cluster:
        for name, value in ENVIRON.items():
            patch.setenv(name, value)
        yield cluster


@pytest.fixture(scope="module")
def served(cluster, tmp_path_factory) -> Iterator[Served]:
    flags = ("--ray-address", cluster.address, *FLAGS)
    with serving(tmp_path_factory.mktemp("ray"), *flags) as server:
        yield Served(cluster, server)
        assert server.stop() == 0


def events(lines: Iterator[str]) -> list[Any]:
    return [json.loads(line[6:]) for line in lines if line != "data: [DONE]"]


def test_what_a_replica_finds_wrong_ends_the_server(cluster):
    flags = ("--ray-address", cluster.address, *FLAGS, "--max-model-len=4096")
    command = [sys.executable, "-m", "outdraft.cli", "serve", "--port", "0", *flags]
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=START_S)
    assert ended.returncode == 2
    assert "max_model_len 4,096 is more than the 1,024 positions" in ended.stderr.splitlines()[-1]


def test_both_nodes_answer(served):
    log = served.server.log.read_text()
    assert {NEAR, FAR} == set(re.findall(r"replica \d on (\S+) is ready", log))
    before = served.routed()
    with ThreadPoolExecutor(8) as threads:
        prompts = [f"def f{number}(" for number in range(8)]
        replies = list(
            threads.map(
                lambda prompt: served.server.complete(prompt=prompt, max_tokens=24), prompts
            )
        )
    assert [reply.status_code for reply in replies] == [200] * 8
    gained = {place: count - before[place] for place, count in served.routed().items()}
    assert set(gained) == {"0", "1"}
    assert all(count > 0 for count in gained.values())
    assert sum(gained.values()) == 8


def test_of_200_requests_none_is_lost_when_a_replica_is_killed(served):
    """Their answers have not begun to be sent, so each of them is computed again."""
    expected = served.server.complete(max_tokens=16).json()["choices"][0]["text"]
    [engine] = served.cluster.far_engines()

    def ask(number: int) -> httpx.Response:
        if number == 60:
            os.kill(engine, signal.SIGKILL)
        return served.server.complete(max_tokens=16, cache_salt=str(number))

    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(ask, range(200)))
    assert [reply.status_code for reply in replies] == [200] * 200
    assert {reply.json()["choices"][0]["text"] for reply in replies} == {expected}
    wait_for(lambda: served.num_replicas() == 2, RECOVERY_S)
    assert served.cluster.far_engines() != [engine]


def test_a_node_that_is_cut_off_costs_the_streams_that_it_had_begun(served):
    wait_for(lambda: served.num_replicas() == 2, RECOVERY_S)
    server = served.server
    long = {"max_tokens": 900}
    with server.stream(prompt="class One:", **long) as one, server.stream(**long) as two:
        begun = [next(one), next(two)]
        served.cluster.cut()
        try:
            ends = [events(one), events(two)]
            meanwhile = server.complete(prompt="while cut off", max_tokens=8)
        finally:
            served.cluster.mend()
    assert all("choices" in json.loads(line[6:]) for line in begun)
    errors = [end[-1]["error"] for end in ends if "error" in end[-1]]
    assert [error["code"] for error in errors] == ["engine_dead"]
    assert f"nothing was heard of {FAR} for 3 s" in errors[0]["message"]
    [whole] = [end for end in ends if "error" not in end[-1]]
    assert whole[-1]["choices"][0]["finish_reason"] == "length"
    assert meanwhile.status_code == 200
    wait_for(lambda: served.num_replicas() == 2, RECOVERY_S)
    assert server.complete(max_tokens=8).status_code == 200
