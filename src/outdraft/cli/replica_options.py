"""The flags of `outdraft serve` that are about several engines of one server."""

from collections.abc import Mapping
from dataclasses import dataclass

from outdraft.cli.command import num_physical_cores
from outdraft.config.engine import EngineConfig
from outdraft.config.fields import flag
from outdraft.core.errors import ConfigError
from outdraft.core.openmp import prepare_openmp
from outdraft.server.replicas.router import ReplicaPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasOptions:
    """Number of engines, and their machines; several need `pip install 'outdraft[ray]'`."""

    data_parallel_size: int = flag(
        "Engines (replicas) that share the requests; with autoscaling: at the start.",
        default=1,
        min=1,
    )
    min_replicas: int | None = flag(
        "Fewest replicas of autoscaling. Default: --data-parallel-size.", min=1
    )
    max_replicas: int | None = flag(
        "Most replicas of autoscaling. Default: --data-parallel-size.", min=1
    )
    target_requests: float = flag(
        "Requests waiting or running, a replica, at which autoscaling aims.", default=16.0, min=0.1
    )
    upscale_delay: float = flag(
        "Seconds for which more replicas are wanted before autoscaling starts them.",
        default=30.0,
        min=0,
    )
    downscale_delay: float = flag(
        "Seconds for which fewer replicas are wanted before autoscaling ends the others.",
        default=600.0,
        min=0,
    )
    replica_cpus: int | None = flag(
        "Cores of a replica, which computes with as many threads. Default: its share of this "
        "machine's cores; 1 on a GPU.",
        min=1,
    )
    replica_timeout: float = flag(
        "Seconds without a sign of life after which a replica counts as lost.",
        default=5.0,
        min=1,
    )
    replica_port: int = flag(
        "Port at which replicas call this server; 0: any that is free.",
        default=0,
        min=0,
        max=65535,
    )
    ray_address: str | None = flag(
        "Cluster of Ray to run replicas on: an address, or local. Default: what RAY_ADDRESS names, "
        "or what `ray start` has started on this machine, or else local: this machine alone."
    )

    @property
    def has_replicas(self) -> bool:
        """True if there is more than the server's one engine."""
        return self.data_parallel_size > 1 or self.max_replicas is not None


def replica_plan(
    options: ReplicasOptions,
    config: EngineConfig,
    environ: Mapping[str, str],
    *,
    has_gpus: bool,
    log_level: str,
    drain_timeout_s: float,
) -> ReplicaPlan:
    """Make the deployment that Ray Serve is asked for.

    Args:
        environ: of this process.
        has_gpus: whether a machine of the cluster has some.

    Raises:
        ConfigError: the numbers contradict each other.
    """
    size = options.data_parallel_size
    fewest = options.min_replicas if options.min_replicas is not None else size
    most = options.max_replicas if options.max_replicas is not None else size
    if not fewest <= size <= most:
        raise ConfigError(
            f"--data-parallel-size ({size}) must be at least --min-replicas ({fewest}) and at most "
            f"--max-replicas ({most})"
        )
    on_gpus = has_gpus and config.device != "cpu"
    num_cpus = options.replica_cpus or (1 if on_gpus else max(1, num_physical_cores() // size))
    chosen: dict[str, str] = {}
    prepare_openmp(chosen)
    chosen["OMP_NUM_THREADS"] = environ.get("OMP_NUM_THREADS", str(num_cpus))
    return ReplicaPlan(
        num_replicas=size,
        min_replicas=fewest,
        max_replicas=most,
        target_requests=options.target_requests,
        upscale_delay_s=options.upscale_delay,
        downscale_delay_s=options.downscale_delay,
        num_cpus=num_cpus,
        num_gpus=config.parallel.tensor_parallel_size if on_gpus else 0,
        environ=chosen,
        log_level=log_level,
        drain_timeout_s=drain_timeout_s,
    )
