"""How many processes compute one model together, and how they watch each other."""

from dataclasses import dataclass

from outdraft.config.checks import check_choice, check_number, check_truth, check_whole
from outdraft.core.errors import ConfigError

MOST_RANKS = 256
MOST_TIMEOUT_S = 86_400.0  # infinity is no time that processes can wait
BACKENDS = ("mp", "ray")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The ranks of an engine: processes that have a part of the target each.

    How many ranks share a drafter is said with the drafter, as `draft_tensor_parallel_size`.

    Attributes:
        tensor_parallel_size: ranks; 1: the engine's own process computes all.
        distributed_executor_backend: who starts the other ranks: "mp": this machine; "ray": a Ray
            cluster, on any of its machines.
        rank_timeout_s: how long one rank waits for another within a step; then that one hangs. A
            server also waits so long for an engine's process that was stopped.
        check_ranks: compare on every rank, in each step, what the ranks were told and what they
            chose. Costs a few small messages and the overlap of steps; to find faults with.
    """

    tensor_parallel_size: int = 1
    distributed_executor_backend: str = "mp"
    rank_timeout_s: float = 10.0
    check_ranks: bool = False

    def __post_init__(self) -> None:
        check_choice("distributed_executor_backend", self.distributed_executor_backend, BACKENDS)
        check_whole("tensor_parallel_size", self.tensor_parallel_size, 1, MOST_RANKS)
        if self.distributed_executor_backend == "ray" and self.tensor_parallel_size == 1:
            raise ConfigError(
                "distributed_executor_backend ray needs tensor_parallel_size above 1: there is no "
                "other rank to start"
            )
        check_number("rank_timeout_s", self.rank_timeout_s, 0.1, MOST_TIMEOUT_S)
        check_truth("check_ranks", self.check_ranks)

    @property
    def has_ranks(self) -> bool:
        """Whether other processes compute, too."""
        return self.tensor_parallel_size > 1
