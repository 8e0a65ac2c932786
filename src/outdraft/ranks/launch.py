"""Loads an engine's networks on as many ranks as its configuration names."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.kernels.choose import check_option
from outdraft.loading.models import (
    LoadedModels,
    check_division,
    choose_device,
    find_files,
    load_models,
)

if TYPE_CHECKING:
    from outdraft.ranks.hosts import RankHosts


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


def _hosts(config: EngineConfig) -> "tuple[RankHosts, torch.device]":
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
        from outdraft.ranks.hosts import LocalHosts

        return LocalHosts(size), device
    try:
        from outdraft.ranks.ray_hosts import RayHosts
    except ImportError:
        raise ConfigError(
            "distributed_executor_backend ray needs Ray: pip install 'outdraft[ray]'"
        ) from None
    hosts = RayHosts(size, device)
    return hosts, hosts.own_device
