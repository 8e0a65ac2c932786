"""The number of replicas, what each one needs, and how many a load asks for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b

from outdraft.config.engine import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """The number of replicas, and what each one needs.

    Attributes:
        num_replicas: at the start.
        min_replicas, max_replicas: how many there may be; both are `num_replicas` without
            autoscaling.
        target_requests: outstanding ones a replica, at which autoscaling aims.
        upscale_delay_s, downscale_delay_s: for which more or fewer are wanted before it acts.
        num_cpus, num_gpus: that Ray reserves for a replica.
        environ: variables of the engine's process, beside those of its machine.
        drain_timeout_s: that a replica's requests have to end when it is not needed any more.
    """

    num_replicas: int
    min_replicas: int
    max_replicas: int
    target_requests: float
    num_cpus: float
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    num_gpus: float = 0
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    log_level: str = "INFO"
    drain_timeout_s: float = 30.0

    @property
    def is_autoscaled(self) -> bool:
        return self.min_replicas < self.max_replicas


def config_of_replica(config: EngineConfig, name: str) -> EngineConfig:
    """The configuration of the replica that has this name: with a seed of its own.

    With a common one, the first requests of all replicas would draw the same noise: prompts that
    are alike would get the same texts, at any temperature.
    """
    digest = blake2b(repr((config.seed, name)).encode(), digest_size=7).digest()
    return replace(config, seed=int.from_bytes(digest, "little"))


def num_wanted(outstanding: Sequence[float], num_replicas: int, target: float) -> int:
    """The number of replicas for `target` outstanding requests each; at least 1.

    Args:
        outstanding: requests of each replica that has reported.
        num_replicas: that run; those that have not reported yet count as the mean of the others.
    """
    if not outstanding:
        return max(1, num_replicas)
    mean = sum(outstanding) / len(outstanding)
    # A sum of means need not be whole where it should be.
    return max(1, math.ceil(round(mean * max(num_replicas, len(outstanding)) / target, 6)))
