"""Puts the parts of a server together."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast, get_args

from rich.console import Console

from outdraft.cli.server_options import ServerOptions
from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.dashboard.feed import EngineFacts, LiveFeed
from outdraft.dashboard.router import dashboard_router
from outdraft.engine.chat import ChatTemplate, special_tokens
from outdraft.server.api.app import create_app
from outdraft.server.api.settings import ApiSettings, ToolCallFormat
from outdraft.server.engine_process import EngineProcess
from outdraft.server.launcher import Launcher, bind
from outdraft.server.logs import LogLevel, TrafficLog, set_up_logging
from outdraft.server.messages import EngineInfo, Loading, Steps
from outdraft.server.metrics import Metrics, metrics_router
from outdraft.server.observed import ObservedClient
from outdraft.server.supervisor import Supervisor

EMBEDDED_NAME = "outdraft"
# The embedded model completes code: nobody taught it who speaks.
JOINED_CONTENTS = "{{ messages | map(attribute='content') | join('\\n') }}"


def run(
    config: EngineConfig, options: ServerOptions, environ: Mapping[str, str], *, is_embedded: bool
) -> int:
    """Serve until a signal; the exit code.

    Raises:
        ConfigError, EngineDeadError: the server could not start.
    """
    settings = _settings(config, options, is_embedded=is_embedded)
    level = _log_level(options.log_level)
    set_up_logging(level, sys.stderr, as_json=options.log_json)
    console = Console(stderr=True, highlight=False, soft_wrap=True)

    def launch() -> EngineProcess:
        return EngineProcess(config, environ, level.upper())

    def show(loading: Loading) -> None:
        console.print(f"loading {loading.stage} of {config.model}", style="dim", markup=False)

    async def serve() -> int:
        with bind(options.host, options.port) as listener:
            supervisor = Supervisor(launch, show, restarts=options.restart_engine)
            await supervisor.start()
            console.print(supervisor.info.memory, markup=False)
            template = _chat_template(supervisor.info, options, is_embedded=is_embedded)
            host, port = listener.getsockname()[:2]
            url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
            console.print(f"\nserving {settings.served_model_names[0]} at {url}", style="bold")
            feed = _live_feed(supervisor, settings.served_model_names[0])
            launcher = Launcher(supervisor, listener, options.drain_timeout, feed.close)
            return await _serve(supervisor, launcher, feed, settings, template)

    return asyncio.run(serve())


async def _serve(
    supervisor: Supervisor,
    launcher: Launcher,
    feed: LiveFeed,
    settings: ApiSettings,
    template: ChatTemplate | None,
) -> int:
    metrics = Metrics(supervisor.info, settings.served_model_names[0])
    client = ObservedClient(supervisor, metrics)
    metrics.watch(feed)
    client.watch(lambda _: feed.without_speculation(metrics.plain_tokens_per_s))
    app = create_app(
        client,
        supervisor.inputs,
        template,
        settings,
        [metrics_router(metrics), dashboard_router(feed)],
        lambda: launcher.is_draining,
    )
    traffic = asyncio.create_task(TrafficLog(metrics).run())
    try:
        return await launcher.serve(app)
    finally:
        traffic.cancel()


def _live_feed(supervisor: Supervisor, name: str) -> LiveFeed:
    """What the page shows, fed by the engine."""
    info = supervisor.info
    feed = LiveFeed(
        EngineFacts(
            name,
            info.dtype,
            info.device,
            tuple(info.speculation_methods),
            info.num_speculative_tokens,
            info.lossless,
        )
    )

    def record(news: Steps) -> None:
        feed.record(news.steps, news.num_running, news.num_waiting, news.kv_usage)

    supervisor.watch(record)
    return feed


def _settings(config: EngineConfig, options: ServerOptions, *, is_embedded: bool) -> ApiSettings:
    """Raises ConfigError if a value is wrong."""
    parsers = get_args(ToolCallFormat)
    if options.tool_call_parser not in (None, *parsers):
        raise ConfigError(
            f"--tool-call-parser must be one of {', '.join(parsers)}, got "
            f"{options.tool_call_parser!r}"
        )
    names = options.served_model_name or [EMBEDDED_NAME if is_embedded else config.model]
    return ApiSettings(
        served_model_names=tuple(names),
        api_key=options.api_key,
        tool_call_parser=cast(ToolCallFormat | None, options.tool_call_parser),
    )


def _log_level(name: str) -> LogLevel:
    try:
        return LogLevel(name)
    except ValueError:
        raise ConfigError(
            f"--log-level must be one of {', '.join(LogLevel)}, got {name!r}"
        ) from None


def _chat_template(
    info: EngineInfo, options: ServerOptions, *, is_embedded: bool
) -> ChatTemplate | None:
    if options.chat_template is not None:
        source = options.chat_template.read_text("utf-8")
        return ChatTemplate(source, special_tokens(Path(info.tokenizer_path)))
    if is_embedded:
        return ChatTemplate(JOINED_CONTENTS, {})
    return ChatTemplate.from_directory(Path(info.tokenizer_path))
