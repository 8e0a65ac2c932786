"""Ranks on the machines of a Ray cluster: each in a process beside an actor that watches it.

The actors have a placement group: all on one machine where that has room, else on several. Rank 0
is the engine's own process; an actor holds its place in the group.
"""

import contextlib
import os
import pickle
import signal
import threading
from collections import Counter
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from outdraft.core.errors import ConfigError, RanksError
from outdraft.core.process import ChildProcess
from outdraft.loading.machine import Cores
from outdraft.ranks.launch import RankHosts, start_worker
from outdraft.ranks.messages import RankAssignment

TOGETHER_S = 5.0  # to find a machine with room for all ranks
APART_S = 60.0  # to find room for them anywhere
POLL_S = 0.2


class RankActor:
    """The actor that starts a rank's process on its machine, and ends with it."""

    def __init__(self) -> None:
        self._process: ChildProcess | None = None

    def place(self) -> tuple[str, list[str]]:
        """Return the address of its machine, and the GPUs that it was given."""
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return ray.util.get_node_ip_address(), gpus

    def start(self, assignment: bytes, num_threads: int) -> None:
        """Start the process. It is a child of the actor, so it ends with it."""
        self._process = start_worker(assignment, num_threads)

    def wait(self) -> int:
        """Wait for the end of the process; return its exit code."""
        assert self._process is not None
        return self._process.wait()


class RayHosts(RankHosts):
    """Starts ranks on the machines of a Ray cluster.

    `own_device`: that of rank 0.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        """Reserve the room.

        Raises:
            ConfigError: there is none, or no cluster.
        """
        _connect()
        self.host = ray.util.get_node_ip_address()
        self._group = _room(size, self.host, device.type == "cuda")
        kind: Any = ray.remote(RankActor)
        self._actors: list[Any] = [
            kind.options(
                num_cpus=1,
                num_gpus=int(device.type == "cuda"),
                max_concurrency=4,  # one of them waits
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, rank),
            ).remote()
            for rank in range(size)
        ]
        self._places: list[tuple[str, list[str]]] = ray.get(
            [actor.place.remote() for actor in self._actors]
        )
        gpus = self._places[0][1]
        self.own_device = torch.device(f"cuda:{gpus[0]}") if gpus else device

    def cores(self, device: torch.device) -> list[Cores]:
        """Share out threads: each machine counts as having as many as this one."""
        neighbours = Counter(host for host, _ in self._places)
        threads = torch.get_num_threads()
        return [Cores(max(1, threads // neighbours[host])) for host, _ in self._places]

    def start(self, assignment: RankAssignment) -> "RayProcess":
        """Start a rank by its actor."""
        host, gpus = self._places[assignment.rank]
        # Its process sees the GPUs of its actor only.
        index = 0 if gpus else None
        placed = replace(assignment, host=host, device_index=index)
        actor = self._actors[assignment.rank]
        return RayProcess(actor, pickle.dumps(placed), assignment.cores.num_threads)

    def close(self) -> None:
        """Give the room back."""
        for actor in self._actors:
            with contextlib.suppress(RayError):  # it has gone with its cluster
                ray.kill(actor)
        remove_placement_group(self._group)


class RayProcess:
    """A rank's process on a machine of the cluster."""

    is_stopped = False  # that is not known

    def __init__(self, actor: Any, assignment: bytes, num_threads: int) -> None:
        self._actor = actor
        self._is_killed = threading.Event()
        try:
            ray.get(actor.start.remote(assignment, num_threads))
        except RayError as error:
            raise RanksError(f"Ray lost a rank: {error}") from None
        self._code = actor.wait.remote()

    def wait(self) -> int:
        """Wait for its end; return its exit code. If its machine is gone, that is -SIGKILL."""
        while not self._is_killed.is_set():
            done, _ = ray.wait([self._code], timeout=POLL_S)
            if done:
                with contextlib.suppress(RayError):
                    return ray.get(self._code)
                break
        return -signal.SIGKILL

    def kill(self) -> None:
        """End it; `wait` returns at once, before the machine hears of it. With a cluster that is
        gone, it has gone."""
        self._is_killed.set()
        with contextlib.suppress(RayError):
            ray.kill(self._actor)


def _connect() -> None:
    """Join the cluster that RAY_ADDRESS names, or that was started on this machine; else a new one.

    Ray's own handler of SIGTERM is removed: the engine's launcher handles signals.
    """
    if ray.is_initialized():
        return
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    # If a cluster begins here: by default Ray gives its processes a low priority.
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(include_dashboard=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(f"distributed_executor_backend ray: {error}") from None
    if is_main:
        signal.signal(signal.SIGTERM, before)


def _room(size: int, host: str, has_gpus: bool) -> PlacementGroup:
    """Reserve a place for each rank, the first one on this machine."""
    one = {"CPU": 1.0, "GPU": 1.0} if has_gpus else {"CPU": 1.0}
    bundles = [{**one, f"node:{host}": 0.001}, *[dict(one) for _ in range(size - 1)]]
    for strategy, seconds in (("STRICT_PACK", TOGETHER_S), ("PACK", APART_S)):
        group = placement_group(bundles, strategy=strategy)
        if group.wait(seconds):
            return group
        remove_placement_group(group)
    what = "a core and a GPU" if has_gpus else "a core"
    raise ConfigError(
        f"the Ray cluster has no room for {size} ranks with {what} each, one of them on {host}: "
        "see `ray status`"
    )
