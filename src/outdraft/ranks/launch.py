"""Loads an engine's networks on as many ranks as its configuration names, and starts the processes
of the others, on this machine or by another host's means."""

import os
import pickle
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.core.process import ChildProcess
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
    from outdraft.ranks.ray_hosts import RayProcess


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
        return RankHosts(size), device
    try:
        from outdraft.ranks.ray_hosts import RayHosts
    except ImportError:
        raise ConfigError(
            "distributed_executor_backend ray needs Ray: pip install 'outdraft[ray]'"
        ) from None
    hosts = RayHosts(size, device)
    return hosts, hosts.own_device


class RankHosts:
    """Starts the ranks but rank 0, on this machine.

    Attributes:
        host: address of this machine, at which rank 0 listens.
    """

    host = "127.0.0.1"

    def __init__(self, size: int) -> None:
        self._size = size

    def cores(self, device: torch.device) -> list[Cores]:
        """The cores of each rank, rank 0 included: equal parts of the machine's; on GPUs any."""
        parts = cores_of_ranks(self._size, torch.get_num_threads(), topology())
        return parts if device.type == "cpu" else [replace(one, cpus=()) for one in parts]

    def start(self, assignment: "RankAssignment") -> "ChildProcess | RayProcess":
        """Start a rank's process."""
        return start_worker(pickle.dumps(assignment), assignment.cores.num_threads)

    def close(self) -> None:
        """Free what is left when no rank is: nothing."""


def start_worker(assigned: bytes, num_threads: int) -> ChildProcess:
    """Start a rank's process as a child of this one; `assigned`: its pickled assignment."""
    # OpenMP reads the number as a process begins.
    environ = {**os.environ, "OMP_NUM_THREADS": str(num_threads)}
    return ChildProcess("outdraft.ranks.worker", assigned, environ)
