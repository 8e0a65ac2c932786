"""Ranks as threads of one process, connected as processes are; engines spread over them."""

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch._C._distributed_c10d import HashStore  # torch.distributed does not name it

from outdraft.config.engine import EngineConfig
from outdraft.core.grammar import AllowedTokens, GrammarDrafts
from outdraft.core.plan import StepPlan, StepResult
from outdraft.distributed.group import RankGroup, Ranks, RequestShares
from outdraft.distributed.process_groups import join_ranks
from outdraft.distributed.shared_memory import MemoryTransports
from outdraft.engine.build import build_engine
from outdraft.engine.llm import LLM
from outdraft.kernels.choose import memory_transports
from outdraft.loading.models import LoadedModels, load_models
from outdraft.runner.model_runner import LaunchedStep, ModelRunner
from outdraft.runner.results import PendingStep
from tests.reference.plain_data import as_bytes, from_bytes

TIMEOUT_S = 60.0
Result = TypeVar("Result")


def on_ranks(
    size: int,
    draft_size: int,
    work: Callable[[Ranks], Result],
    over_memory: Sequence[MemoryTransports | None] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> list[Result]:
    """What each rank returns; `over_memory`: of each rank, None: as in an engine."""
    transports = over_memory or [memory_transports()] * size
    store = HashStore()
    results: dict[int, Result] = {}
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            how = torch.device("cpu"), timeout_s, transports[rank]
            ranks = join_ranks(store, rank, size, draft_size, *how)
            results[rank] = work(ranks)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(size)]


def equal_shares(group: RankGroup, num_requests: int) -> RequestShares:
    """Each rank of a group has an equal part of the requests; the last ones have one more."""
    ends = [num_requests * rank // group.size for rank in range(group.size + 1)]
    return RequestShares(group, tuple(end - start for start, end in itertools.pairwise(ends)))


def spread_models(
    config: EngineConfig,
    size: int,
    draft_size: int,
    over_memory: Sequence[MemoryTransports | None] | None = None,
) -> list[LoadedModels]:
    """Those of each rank; `over_memory` as in `on_ranks`."""
    return on_ranks(size, draft_size, lambda ranks: load_models(config, ranks), over_memory)


class Spread:
    """Ranks but the first one: each runs what the first one is told, from its bytes, in a thread.

    Attributes:
        runners: of all ranks.
    """

    def __init__(self, llm: LLM, models: Sequence[LoadedModels]) -> None:
        """`llm`: an engine with the first rank's models."""
        own = llm.engine.runner
        self.runners = [own]
        self.errors: list[BaseException] = []
        self._queues: list[queue.SimpleQueue[bytes | None]] = []
        self._threads: list[threading.Thread] = []
        for rank_models in models[1:]:
            engine, _ = build_engine(llm.config, replace(rank_models, config=llm.config))
            self.runners.append(engine.runner)
            self._queues.append(queue.SimpleQueue())
            args = engine.runner, self._queues[-1]
            self._threads.append(threading.Thread(target=self._serve, args=args, daemon=True))
            self._threads[-1].start()
        self._launch, self._drafted = own.launch, own.drafted
        self._verify, self._collect = own.verify, own.collect
        own.launch, own.drafted, own.verify = self.launch, self.drafted, self.verify
        own.collect = self.collect

    def __enter__(self) -> "Spread":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Let the threads end, behind all that they were told."""
        if kind is not None:
            return  # they are daemons, and may wait for a rank that has gone
        for one in self._queues:
            one.put(None)
        for thread in self._threads:
            thread.join()
        assert not self.errors

    def launch(self, plan: StepPlan) -> PendingStep | LaunchedStep:
        self._tell(as_bytes(plan))
        return self._launch(plan)

    def drafted(self, step: LaunchedStep) -> GrammarDrafts:
        return self._drafted(step)

    def verify(self, step: LaunchedStep, allowed: AllowedTokens) -> PendingStep:
        self._tell(as_bytes(allowed))
        return self._verify(step, allowed)

    def collect(self, pending: PendingStep) -> StepResult:
        result = self._collect(pending)
        if self.errors:
            raise self.errors[0]
        return result

    def _tell(self, data: bytes) -> None:
        for one in self._queues:
            one.put(data)

    def _serve(self, runner: ModelRunner, plans: "queue.SimpleQueue[bytes | None]") -> None:
        try:
            while (data := plans.get()) is not None:
                step = runner.launch(from_bytes(StepPlan, data))
                if isinstance(step, LaunchedStep):
                    masks = plans.get()
                    assert masks is not None
                    runner.verify(step, from_bytes(AllowedTokens, masks))
        except BaseException as error:
            self.errors.append(error)
