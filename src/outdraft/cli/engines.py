"""Starts the engines that answer a server's requests: one, or several with one client."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry

from outdraft.cli.replica_options import ReplicasOptions, replica_plan
from outdraft.cli.serve import ServerOptions
from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError, EngineDeadError
from outdraft.dashboard.feed import LiveFeed
from outdraft.server.client import EngineClient, EngineProcess
from outdraft.server.messages import EngineInfo, Loading, Steps
from outdraft.server.metrics import Metrics
from outdraft.server.process_client import Supervisor
from outdraft.server.trace_file import TraceFile

if TYPE_CHECKING:
    from outdraft.server.metrics import ReplicaMetrics
    from outdraft.server.replicas.deployment import Deployment
    from outdraft.server.replicas.pool import ReplicaPool

STATUS_POLL_S = 2.0
NO_RAY = "--data-parallel-size and --max-replicas need Ray: pip install 'outdraft[ray]'"


@dataclass(frozen=True, slots=True)
class Starting:
    """Arguments that engines are started with.

    Attributes:
        environ: of engine processes on this machine.
        name: of the model, for metrics.
        show: called with each stage of an engine's start.
    """

    config: EngineConfig
    options: ServerOptions
    environ: Mapping[str, str]
    name: str
    show: Callable[[Loading], None]
    trace: TraceFile | None


@dataclass(frozen=True, slots=True)
class Started:
    """A client of engines that are ready, and their numbers.

    Attributes:
        metrics: of each engine.
        registry: all of them together.
        show: has a page shown what the engines do.
    """

    client: EngineClient
    metrics: Collection[Metrics]
    registry: CollectorRegistry
    show: Callable[[LiveFeed], None]


@asynccontextmanager
async def one_engine(parts: Starting) -> AsyncGenerator[Started]:
    """An engine process of this machine. Raises ConfigError, EngineDeadError."""

    def launch() -> EngineProcess:
        return EngineProcess(parts.config, parts.environ, parts.options.log_level.upper())

    supervisor = Supervisor(launch, parts.show, restarts=parts.options.restart_engine)
    if parts.trace is not None:
        supervisor.record(parts.trace)
    await supervisor.start()
    metrics = Metrics(supervisor.info, parts.name)
    supervisor.observe(metrics)
    show = partial(_show, metrics, supervisor.watch)
    yield Started(supervisor, [metrics], metrics.registry, show)


@asynccontextmanager
async def several_engines(parts: Starting, options: ReplicasOptions) -> AsyncGenerator[Started]:
    """Replicas that Ray Serve starts. Raises ConfigError, EngineDeadError."""
    try:
        from outdraft.server.replicas.deployment import Deployment, connect, has_gpus
    except ImportError:
        raise ConfigError(NO_RAY) from None
    from outdraft.server.metrics import ReplicaMetrics
    from outdraft.server.replicas.pool import ReplicaPool
    from outdraft.server.replicas.switchboard import Switchboard

    host = connect(options.ray_address)
    config = parts.config
    plan = replica_plan(
        options,
        config,
        parts.environ,
        has_gpus=has_gpus(),
        log_level=parts.options.log_level.upper(),
        drain_timeout_s=parts.options.drain_timeout,
    )
    metrics = ReplicaMetrics(parts.name)
    board = Switchboard(host, options.replica_port, options.replica_timeout)

    def localised(info: EngineInfo) -> EngineInfo:
        return with_local_paths(info, config)

    pool = ReplicaPool(board, config.cache.block_size, parts.show, localised, metrics)
    if parts.trace is not None:
        pool.record(parts.trace)
    deployment = Deployment(config, plan, pool.address)
    try:
        await _start(pool, deployment, plan.num_replicas)
        show = partial(_show, metrics, metrics.watch_steps)
        yield Started(pool, metrics.all, metrics.registry, show)
    finally:
        pool.close("the server is shutting down")
        await asyncio.to_thread(deployment.delete)


async def _start(pool: "ReplicaPool", deployment: "Deployment", num_replicas: int) -> None:
    """Wait until all replicas are ready. Raises ConfigError, EngineDeadError: they never will be.

    A replica's own words about its failure say more than those of Ray Serve.
    """
    await asyncio.to_thread(deployment.start)
    starting = asyncio.create_task(pool.start(num_replicas))
    try:
        while not (await asyncio.wait({starting}, timeout=STATUS_POLL_S))[0]:
            if (failure := await asyncio.to_thread(deployment.failure)) is not None:
                raise EngineDeadError(f"Ray Serve could not start the replicas: {failure}")
        starting.result()
    finally:
        starting.cancel()


def with_local_paths(info: EngineInfo, config: EngineConfig) -> EngineInfo:
    """Replace a replica's directories of model and tokenizer by those of this machine.

    Raises:
        ConfigError: they are not here, nor on the hub.
    """
    model, tokenizer = Path(info.model_path), Path(info.tokenizer_path)
    if model.exists() and tokenizer.exists():
        return info
    from outdraft.loading.models import tokenizer_path  # imports torch
    from outdraft.models.checkpoints.files import resolve_model_path

    if not model.exists():
        model = resolve_model_path(config.model, config.revision, with_weights=False)
    if not tokenizer.exists():
        tokenizer = tokenizer_path(config, model)
    return msgspec.structs.replace(info, model_path=str(model), tokenizer_path=str(tokenizer))


def check_replicas(config: EngineConfig, options: ServerOptions, replicas: ReplicasOptions) -> None:
    """Raise ConfigError if a flag has no meaning with replicas, or none without them."""
    if replicas.has_replicas:
        if config.parallel.distributed_executor_backend == "ray":
            raise ConfigError(
                "--distributed-executor-backend ray is for one engine: the ranks of a replica "
                "share its machine"
            )
        if options.profiler_config is not None:
            raise ConfigError("--profiler-config traces one engine, not several replicas")
        if options.restart_engine:
            raise ConfigError("--restart-engine is for one engine: replicas are always replaced")
    elif replicas.min_replicas is not None:
        raise ConfigError("--min-replicas needs --max-replicas, or --data-parallel-size above 1")


def engine_facts(info: EngineInfo, name: str) -> dict[str, Any]:
    """Facts of the engine that the page shows."""
    shown = ("dtype", "device", "speculation_methods", "num_speculative_tokens", "lossless")
    return {"model": name, **{field: getattr(info, field) for field in shown}}


def _show(
    metrics: "Metrics | ReplicaMetrics",
    watch: Callable[[Callable[[Steps], None]], None],
    feed: LiveFeed,
) -> None:
    """Have a page shown latencies and steps."""

    def record(news: Steps) -> None:
        feed.record(news.steps, news.num_running, news.num_waiting, news.kv_usage)
        feed.without_speculation(metrics.plain_tokens_per_s)

    metrics.watch(feed)
    watch(record)
