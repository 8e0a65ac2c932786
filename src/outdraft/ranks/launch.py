"""Loads an engine's networks on as many ranks as its configuration names, and starts the processes
of the others, on this machine or by another host's means."""

import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import torch

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.kernels.choose import check_option
from outdraft.loading.machine import Cores, cores_of_ranks, topology
from outdraft.loading.models import (
    LoadedModels,
    check_division,
    choose_device,
    find_files,
    load_models,
)

if TYPE_CHECKING:
    from outdraft.ranks.messages import RankAssignment

COMMAND = (sys.executable, "-m", "outdraft.ranks.worker")


def load_on_ranks(config: EngineConfig) -> LoadedModels:
    """Load the networks that the configuration names; of several ranks this process becomes rank 0.

    Raises:
        ConfigError, RanksError: as from `load_models`; the other ranks have ended.
    """
    if not config.parallel.has_ranks:
        return load_models(config)
    # Imported here: one rank needs no libraries of several.
    from outdraft.ranks.processes import RankProcesses

    hosts, device = _hosts(config)
    processes = RankProcesses(config, hosts)
    try:
        models = load_models(config, processes.start(device), device)
        processes.answers()  # they have loaded theirs
    except BaseException:
        processes.end()
        raise
    return replace(models, processes=processes)


def _hosts(config: EngineConfig) -> tuple["RankHosts", torch.device]:
    """Make the hosts of all ranks, and choose the device of rank 0. What is wrong with the
    configuration is found before."""
    check_option(config.kernels)
    size, device = config.parallel.tensor_parallel_size, choose_device(config.device, 0)
    on_cluster = config.parallel.distributed_executor_backend == "ray"
    if not on_cluster and device.type == "cuda" and size > torch.cuda.device_count():
        raise ConfigError(
            f"tensor_parallel_size must be at most {torch.cuda.device_count()}, the number of "
            f"GPUs, got {size}"
        )
    check_division(config)
    find_files(config)  # downloads once, not on every rank
    if not on_cluster:
        return LocalHosts(size), device
    try:
        from outdraft.ranks.ray_hosts import RayHosts
    except ImportError:
        raise ConfigError(
            "distributed_executor_backend ray needs Ray: pip install 'outdraft[ray]'"
        ) from None
    hosts = RayHosts(size, device)
    return hosts, hosts.own_device


class RankProcess(Protocol):
    """The process of one rank."""

    @property
    def pid(self) -> int | None:
        """Its id; None: it runs on another machine."""
        ...

    def wait(self) -> int:
        """Wait for its end; return its exit code, as in subprocess."""
        ...

    def kill(self) -> None:
        """End it, so that `wait` returns, and free what is left of it; it may have ended."""
        ...


class RankHosts(Protocol):
    """Starts the ranks but rank 0, and gives the address where they find it.

    Attributes:
        host: address of this machine, at which rank 0 listens.
    """

    host: str

    def cores(self, device: torch.device) -> list[Cores]:
        """The cores of each rank, rank 0 included."""
        ...

    def start(self, assignment: "RankAssignment") -> RankProcess:
        """Start a rank's process."""
        ...

    def close(self) -> None:
        """Free what is left when no rank is."""
        ...


class LocalHosts:
    """Starts ranks on this machine."""

    host = "127.0.0.1"

    def __init__(self, size: int) -> None:
        self._size = size

    def cores(self, device: torch.device) -> list[Cores]:
        """Equal parts of this machine's cores; on GPUs any of them."""
        parts = cores_of_ranks(self._size, torch.get_num_threads(), topology())
        return parts if device.type == "cpu" else [replace(one, cpus=()) for one in parts]

    def start(self, assignment: "RankAssignment") -> "LocalProcess":
        """Start a child of this process."""
        return LocalProcess(pickle.dumps(assignment), assignment.cores.num_threads)

    def close(self) -> None:
        """Do nothing: nothing is left."""


class LocalProcess:
    """A rank's process on this machine. It ends when this process does, however that ends."""

    def __init__(self, assignment: bytes, num_threads: int) -> None:
        self._process = subprocess.Popen(
            COMMAND,
            stdin=subprocess.PIPE,
            # OpenMP reads it as a process begins.
            env={**os.environ, "OMP_NUM_THREADS": str(num_threads)},
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `wait` returns its exit code
            self._process.stdin.write(assignment)
            self._process.stdin.flush()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self) -> int:
        return self._process.wait()

    def kill(self) -> None:
        assert self._process.stdin is not None
        self._process.kill()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
