"""Replicas on this machine, each a relay in a process of its own with an engine beside it."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from typing import Any

from outdraft.config.engine import EngineConfig
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.server.client import EngineProcess, Update
from outdraft.server.metrics import ReplicaMetrics
from outdraft.server.replicas.pool import ReplicaPool
from outdraft.server.replicas.switchboard import Address, Relay, Switchboard
from tests.server.process.engines import config, processes

LOST_AFTER_S = 2.0


def replica(config: EngineConfig, address: Address, name: str) -> None:
    """The main function of a replica's process. SIGUSR1 has it leave, as Ray Serve does."""

    async def run() -> None:
        engine = EngineProcess(config, {**os.environ, "OMP_NUM_THREADS": "1"}, "WARNING")
        relay = Relay(engine, address, name, f"node of {name}", lost_after_s=60.0)
        leaving: list[asyncio.Task[None]] = []
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGUSR1, lambda: leaving.append(asyncio.create_task(relay.leave()))
        )
        await relay.run()
        await asyncio.gather(*leaving)

    asyncio.run(run())


@dataclass
class Pooled:
    """A pool, its replicas, and the event loop that it lives in."""

    runner: asyncio.Runner
    pool: ReplicaPool
    metrics: ReplicaMetrics
    config: EngineConfig
    replicas: dict[str, BaseProcess]  # by name

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    def add(self, name: str) -> None:
        process = get_context("spawn").Process(
            target=replica, args=(self.config, self.pool.address, name), daemon=True
        )
        process.start()
        self.replicas[name] = process

    def engine(self, name: str) -> int:
        """The id of an engine's process."""
        pid = self.replicas[name].pid
        assert pid is not None
        [engine] = processes(pid)
        return engine

    async def stream(self, prompt: str, params: SamplingParams, **options: Any) -> list[Update]:
        encoded = self.pool.inputs.encoded(prompt, **options)
        return [update async for update in self.pool.generate("id", encoded, params)]

    async def output(self, prompt: str, params: SamplingParams, **options: Any) -> RequestOutput:
        return (await self.stream(prompt, params, **options))[-1].output

    def counted(self, name: str, **labels: str) -> float:
        """A sum over all values of the labels that are not named."""
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            for sample in family.samples
            if sample.name == f"outdraft:{name}" and labels.items() <= sample.labels.items()
        )


@contextmanager
def pooled(*names: str, **options: Any) -> Iterator[Pooled]:
    """A pool whose replicas have these names; options: of their engines."""
    chosen = config(**options)

    async def make() -> tuple[ReplicaPool, ReplicaMetrics]:
        metrics = ReplicaMetrics("m")
        board = Switchboard("127.0.0.1", 0, LOST_AFTER_S)
        size = chosen.cache.block_size
        return ReplicaPool(board, size, lambda _: None, lambda info: info, metrics), metrics

    with asyncio.Runner() as runner:
        result = Pooled(runner, *runner.run(make()), chosen, {})
        try:
            for name in names:
                result.add(name)
            result.run(result.pool.start(len(names)))
            yield result
        finally:
            runner.run(_close(result.pool))
            for process in result.replicas.values():
                process.kill()
                process.join()


async def _close(pool: ReplicaPool) -> None:
    pool.close("the tests are over")
    await pool.run()
