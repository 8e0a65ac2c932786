"""Puts the parts of a server together: one engine or several, their client, and the API."""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, cast, get_args

import msgspec
from rich.console import Console

from outdraft.cli.serve import (
    API_KEY_VARIABLE,
    ReplicasOptions,
    ServerOptions,
    api_key,
    listed,
    profiler_dir,
    replica_plan,
)
from outdraft.config.engine import EngineConfig
from outdraft.config.fields import as_choice, check_choice
from outdraft.core.errors import ConfigError, EngineDeadError
from outdraft.dashboard.feed import LiveFeed
from outdraft.dashboard.router import dashboard_router
from outdraft.models.checkpoints.config_json import default_sampling
from outdraft.server.api.app import create_app
from outdraft.server.api.middleware import is_loopback
from outdraft.server.api.reasoning import check_marks
from outdraft.server.api.settings import ApiContext, ApiSettings, ReasoningFormat, ToolCallFormat
from outdraft.server.client import EngineProcess
from outdraft.server.launcher import Launcher, bind, check_certificate
from outdraft.server.logs import LogLevel, TrafficLog, set_up_logging
from outdraft.server.messages import EngineInfo, Loading, Steps
from outdraft.server.metrics import Metrics, metrics_router
from outdraft.server.process_client import Supervisor
from outdraft.server.trace_file import TraceFile
from outdraft.text.chat import ChatTemplate, as_content_format, special_tokens

if TYPE_CHECKING:
    from outdraft.server.metrics import ReplicaMetrics
    from outdraft.server.replicas.deployment import Deployment
    from outdraft.server.replicas.pool import ReplicaPool

_logger = logging.getLogger(__name__)

EMBEDDED_NAME = "outdraft"
# The embedded model completes code: it was not trained on conversations.
JOINED_CONTENTS = "{{ messages | map(attribute='content') | join('\\n') }}"
STATUS_POLL_S = 2.0
NO_RAY = "--data-parallel-size and --max-replicas need Ray: pip install 'outdraft[ray]'"


@dataclass(frozen=True, slots=True)
class Started:
    """A client of engines that are ready, and their numbers.

    Attributes:
        total: of all engines together.
        watch: has a function called with the steps of the engines.
    """

    client: "Supervisor | ReplicaPool"
    total: "Metrics | ReplicaMetrics"
    watch: Callable[[Callable[[Steps], None]], None]


def run(
    config: EngineConfig,
    options: ServerOptions,
    replicas: ReplicasOptions,
    environ: Mapping[str, str],
    *,
    is_embedded: bool,
) -> int:
    """Serve until a signal; the exit code.

    Raises:
        ConfigError, EngineDeadError: the server could not start.
    """
    settings = settings_of(config, options, environ, is_embedded=is_embedded)
    check_certificate(options.ssl_certfile, options.ssl_keyfile)
    scheme = "http" if options.ssl_certfile is None else "https"
    chosen_hosts = listed(options.allowed_hosts, "--allowed-hosts")
    environ = {name: value for name, value in environ.items() if name != API_KEY_VARIABLE}
    given_template = _given_template(options)  # refused before anything is loaded
    level = as_choice("--log-level", options.log_level, LogLevel)
    set_up_logging(level, sys.stderr, as_json=options.log_json)
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    check_replicas(config, options, replicas)

    def show(loading: Loading) -> None:
        console.print(f"loading {loading.stage} of {config.model}", style="dim", markup=False)

    async def serve(trace: TraceFile | None) -> int:
        with bind(options.host, options.port) as listener:
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            _warn_of_guests(console, host, shown, settings)
            name = settings.served_model_names[0]
            engines = (
                several_engines(config, options, replicas, environ, name, show)
                if replicas.has_replicas
                else one_engine(config, options, environ, name, show)
            )
            async with engines as started:
                info = started.client.info
                if trace is not None:
                    started.client.record(trace)
                if settings.reasoning_parser is not None:
                    check_marks(started.client.inputs.tokenizer)
                _show_engine(console, info, config)
                complete = replace(
                    settings,
                    allowed_hosts=allowed_hosts(chosen_hosts, options.host, host),
                    default_sampling=_default_sampling(config, info),
                )
                template = _chat_template(info, options, given_template, is_embedded=is_embedded)
                console.print(f"\nserving {name} at {scheme}://{shown}", style="bold", markup=False)
                return await _serve(started, listener, options, complete, template)

    path = options.record_trace  # refused before anything is loaded
    with nullcontext() if path is None else TraceFile(path, config.speculation) as trace:
        return asyncio.run(serve(trace))


async def _serve(
    started: Started,
    listener: socket,
    options: ServerOptions,
    settings: ApiSettings,
    template: ChatTemplate | None,
) -> int:
    client, feed = started.client, live_feed(started, settings.served_model_names[0])
    launcher = Launcher(
        client,
        listener,
        options.drain_timeout,
        feed.close,
        options.ssl_certfile,
        options.ssl_keyfile,
        options.header_timeout,
        options.body_timeout,
    )
    context = ApiContext(client, client.inputs, template, settings, lambda: launcher.is_draining)
    app = create_app(context, [metrics_router(started.total.registry), dashboard_router(feed)])
    traffic = asyncio.create_task(TrafficLog(started.total.registry).run())
    try:
        return await launcher.serve(app)
    finally:
        traffic.cancel()


@asynccontextmanager
async def one_engine(
    config: EngineConfig,
    options: ServerOptions,
    environ: Mapping[str, str],
    name: str,
    show: Callable[[Loading], None],
) -> AsyncGenerator[Started]:
    """An engine process of this machine.

    Args:
        environ: of the engine's process.
        name: of the model, for metrics.
        show: called with each stage of the engine's start.

    Raises:
        ConfigError, EngineDeadError: it cannot start.
    """

    def launch() -> EngineProcess:
        return EngineProcess(config, environ, options.log_level.upper())

    supervisor = Supervisor(launch, show, restarts=options.restart_engine)
    await supervisor.start()
    metrics = Metrics(supervisor.info, name)
    supervisor.observe(metrics)
    yield Started(supervisor, metrics, supervisor.watchers.append)


@asynccontextmanager
async def several_engines(
    config: EngineConfig,
    options: ServerOptions,
    replicas: ReplicasOptions,
    environ: Mapping[str, str],
    name: str,
    show: Callable[[Loading], None],
) -> AsyncGenerator[Started]:
    """Replicas that Ray Serve starts; else see `one_engine`."""
    try:
        from outdraft.server.replicas.deployment import Deployment, connect, has_gpus
    except ImportError:
        raise ConfigError(NO_RAY) from None
    from outdraft.server.metrics import ReplicaMetrics
    from outdraft.server.replicas.pool import ReplicaPool
    from outdraft.server.replicas.switchboard import Switchboard

    host = connect(replicas.ray_address)
    plan = replica_plan(replicas, options, config, environ, has_gpus())
    metrics = ReplicaMetrics(name)
    board = Switchboard(host, replicas.replica_port, replicas.replica_timeout)

    def localised(info: EngineInfo) -> EngineInfo:
        return with_local_paths(info, config)

    pool = ReplicaPool(board, config.cache.block_size, show, localised, metrics)
    deployment = Deployment(config, plan, pool.address)
    try:
        await _start(pool, deployment, plan.num_replicas)
        yield Started(pool, metrics, metrics.step_watchers.append)
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


def live_feed(started: Started, name: str) -> LiveFeed:
    """Make the page's feed, and have it shown latencies and steps. `name`: of the model."""
    info = started.client.info
    shown = ("dtype", "device", "speculation_methods", "num_speculative_tokens", "lossless")
    feed = LiveFeed({"model": name, **{field: getattr(info, field) for field in shown}})

    def record(news: Steps) -> None:
        feed.record(news.steps, news.num_running, news.num_waiting, news.kv_usage)
        feed.without_speculation(started.total.plain_tokens_per_s)

    started.total.watchers.append(feed.latency)
    started.watch(record)
    return feed


def _show_engine(console: Console, info: EngineInfo, config: EngineConfig) -> None:
    """Print the memory of an engine, and its ranks if it has several."""
    console.print(info.memory, markup=False)
    size, drafters = info.tensor_parallel_size, ""
    if size == 1:
        return
    if config.speculation.network is not None:
        draft_size = config.draft_tensor_parallel_size
        drafters = f", {size // draft_size} drafters over {draft_size} each"
    console.print(f"the target over {size} ranks{drafters}", markup=False)


def _warn_of_guests(console: Console, host: str, shown: str, settings: ApiSettings) -> None:
    """Warn if other machines may use a server without a key."""
    if is_loopback(host) or settings.api_key is not None:
        return
    console.print(
        f"WARNING: everybody who can reach {shown} may use this server: give it a key "
        f"with --api-key-file or {API_KEY_VARIABLE}, or --host 127.0.0.1",
        style="bold red",
        markup=False,
    )


def _default_sampling(config: EngineConfig, info: EngineInfo) -> dict[str, Any]:
    found = default_sampling(config, Path(info.model_path))
    if found:
        _logger.info(
            "requests that leave them open are sampled with %s; --generation-config vllm: without",
            found,
        )
    return found


def allowed_hosts(chosen: tuple[str, ...], host: str, listens_on: str) -> tuple[str, ...] | None:
    """The names, beside loopback ones, that requests may be for; None: any.

    Args:
        chosen: values of --allowed-hosts.
        host: value of --host.
        listens_on: the address that it means.
    """
    if "*" in chosen:
        return None
    if is_loopback(listens_on):
        return (*chosen, host)
    return chosen or None


def settings_of(
    config: EngineConfig, options: ServerOptions, environ: Mapping[str, str], *, is_embedded: bool
) -> ApiSettings:
    """Make the settings of the API. Raises ConfigError if a value is wrong."""
    parsers = (
        ("--tool-call-parser", options.tool_call_parser, get_args(ToolCallFormat)),
        ("--reasoning-parser", options.reasoning_parser, get_args(ReasoningFormat)),
    )
    for flag, name, known in parsers:
        if name is not None:
            check_choice(flag, name, known)
    if options.enable_auto_tool_choice and options.tool_call_parser is None:
        raise ConfigError("--enable-auto-tool-choice needs --tool-call-parser")
    path = options.root_path
    if path and (not path.startswith("/") or path.endswith("/")):
        raise ConfigError(f"--root-path must begin with / and not end with it, got {path!r}")
    names = options.served_model_name or [EMBEDDED_NAME if is_embedded else config.model]
    if not all(names):
        raise ConfigError("--served-model-name must not be empty")
    return ApiSettings(
        served_model_names=tuple(names),
        api_key=api_key(options, environ),
        allowed_origins=listed(options.allowed_origins, "--allowed-origins"),
        root_path=path,
        log_requests=options.enable_log_requests,
        profiler_dir=profiler_dir(options.profiler_config),
        tool_call_parser=cast(ToolCallFormat | None, options.tool_call_parser),
        auto_tool_choice=options.enable_auto_tool_choice is not False,
        reasoning_parser=cast(ReasoningFormat | None, options.reasoning_parser),
    )


def _chat_template(
    info: EngineInfo, options: ServerOptions, given: str | None, *, is_embedded: bool
) -> ChatTemplate | None:
    content_format = as_content_format(options.chat_template_content_format)
    if given is not None:
        return ChatTemplate(given, special_tokens(Path(info.tokenizer_path)), content_format)
    if is_embedded:
        return ChatTemplate(JOINED_CONTENTS, {})
    return ChatTemplate.from_directory(Path(info.tokenizer_path), content_format)


def _given_template(options: ServerOptions) -> str | None:
    """The text of --chat-template, if it is given.

    Raises:
        ConfigError: it cannot be read or is no template, or the content format is unknown.
    """
    content_format = as_content_format(options.chat_template_content_format)
    path = options.chat_template
    if path is None:
        return None
    try:
        source = path.read_text("utf-8")
        ChatTemplate(source, {}, content_format)
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigError(f"--chat-template {path}: {error}") from error
    return source
