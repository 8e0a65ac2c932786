"""`outdraft serve` on a Ray cluster of two nodes: a replica on each, or a rank on each. None of its
requests is lost in silence, whatever happens to a node."""

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

from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from tests.cli.pair import pair
from tests.server.process.engines import PROMPTS, config
from tests.server.replicas.cluster import (
    ENVIRON,
    FAR,
    NEAR,
    Cluster,
    may_make_namespaces,
    two_nodes,
)
from tests.server.served import START_S, Server, serving, wait_for

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'outdraft[ray]'", allow_module_level=True)
if not may_make_namespaces():
    pytest.skip("needs root and `ip`, to make network namespaces", allow_module_level=True)

pytestmark = [pytest.mark.cluster, pytest.mark.xdist_group("ray")]

RECOVERY_S = 240.0
ENGINE, RANK = "outdraft.server.core_process", "outdraft.ranks.worker"
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
        for name, value in (*ENVIRON.items(), ("RAY_ADDRESS", cluster.address)):
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
    ended = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=2 * START_S)
    assert ended.returncode == 2
    assert "max_model_len 4,096 is more than the 1,024 positions" in ended.stderr.splitlines()[-1]


@pytest.fixture(scope="module")
def spread(cluster, tmp_path_factory) -> Iterator[Server]:
    """A server whose two ranks are on two nodes: none has room for both."""
    flags = ["-tp", "2", "--distributed-executor-backend", "ray", "--rank-timeout", "3"]
    flags += ["--dtype", "float64", "--kv-cache-memory-bytes", "4Mi"]
    flags += ["--speculative-config", '{"method": "suffix", "control": "fixed"}']
    with serving(tmp_path_factory.mktemp("ranks"), str(pair().target), *flags) as server:
        yield server


def test_ranks_on_two_nodes_answer_as_one_process_does(cluster, spread):
    assert len(cluster.far(RANK)) == 1
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    alone = LLM.from_config(config(dtype="float64", speculative_config=None))
    expected = [one.outputs[0].text for one in alone.generate(PROMPTS, params, use_tqdm=False)]
    replies = [spread.complete(prompt=prompt, max_tokens=24).json() for prompt in PROMPTS]
    assert [reply["choices"][0]["text"] for reply in replies] == expected


def test_a_rank_that_is_cut_off_ends_the_server_with_an_error(cluster, spread):
    with spread.stream(max_tokens=150) as lines:
        begun = json.loads(next(lines)[6:])
        cluster.cut()
        try:
            *_, last = events(lines)
            code = spread.wait()
        finally:
            cluster.mend()
    assert "choices" in begun
    assert last["error"]["code"] == "engine_dead"
    assert "rank 1 of 2 did not answer for 3 s" in spread.log.read_text()
    assert code == 1
    wait_for(lambda: not cluster.far(RANK), RECOVERY_S)


def check_that_none_is_lost(server: Server, killed: int, num_requests: int) -> None:
    """A process is killed in the midst of so many requests. As their answers have not begun to be
    sent, those that it had are computed again."""
    expected = server.complete(max_tokens=16).json()["choices"][0]["text"]

    def ask(number: int) -> httpx.Response:
        if number == num_requests // 3:
            os.kill(killed, signal.SIGKILL)
        return server.complete(max_tokens=16, cache_salt=str(number))

    with ThreadPoolExecutor(8) as threads:
        replies = list(threads.map(ask, range(num_requests)))
    assert [reply.status_code for reply in replies] == [200] * num_requests
    assert {reply.json()["choices"][0]["text"] for reply in replies} == {expected}


def test_replicas_of_two_ranks_lose_no_request_with_a_rank(cluster, tmp_path):
    with serving(tmp_path, "--ray-address", cluster.address, *FLAGS, "-tp", "2") as server:
        [rank] = cluster.far(RANK)
        check_that_none_is_lost(server, rank, 60)
        assert "rank 1 of 2: its process was ended by SIGKILL" in server.log.read_text()
        wait_for(lambda: server.metrics()["replicas"] == 2, RECOVERY_S)
        assert cluster.far(RANK) != [rank]
        assert server.stop() == 0
    wait_for(lambda: not cluster.far(RANK), RECOVERY_S)


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
    [engine] = served.cluster.far(ENGINE)
    check_that_none_is_lost(served.server, engine, 200)
    wait_for(lambda: served.num_replicas() == 2, RECOVERY_S)
    assert served.cluster.far(ENGINE) != [engine]


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
