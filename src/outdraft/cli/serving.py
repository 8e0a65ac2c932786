"""Puts the parts of a server together."""

import asyncio
import logging
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, cast, get_args

from rich.console import Console

from outdraft.cli.engines import (
    Started,
    Starting,
    check_replicas,
    engine_facts,
    one_engine,
    several_engines,
)
from outdraft.cli.replica_options import ReplicasOptions
from outdraft.cli.serve import (
    API_KEY_VARIABLE,
    ServerOptions,
    api_key,
    listed,
    profiler_dir,
)
from outdraft.config.engine import EngineConfig
from outdraft.config.fields import as_choice, check_choice
from outdraft.core.errors import ConfigError
from outdraft.dashboard.feed import LiveFeed
from outdraft.dashboard.router import dashboard_router
from outdraft.loading.generation_config import default_sampling
from outdraft.server.api.app import create_app
from outdraft.server.api.middleware import is_loopback
from outdraft.server.api.reasoning import check_marks
from outdraft.server.api.settings import ApiContext, ApiSettings, ReasoningFormat, ToolCallFormat
from outdraft.server.launcher import Launcher, bind, check_certificate
from outdraft.server.logs import LogLevel, TrafficLog, set_up_logging
from outdraft.server.messages import EngineInfo, Loading
from outdraft.server.metrics import metrics_router
from outdraft.server.trace_file import TraceFile
from outdraft.text.chat import ChatTemplate, as_content_format, special_tokens

_logger = logging.getLogger(__name__)

EMBEDDED_NAME = "outdraft"
# The embedded model completes code: it was not trained on conversations.
JOINED_CONTENTS = "{{ messages | map(attribute='content') | join('\\n') }}"


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
    has_replicas = replicas.has_replicas
    check_replicas(config, options, replicas)

    def show(loading: Loading) -> None:
        console.print(f"loading {loading.stage} of {config.model}", style="dim", markup=False)

    async def serve(trace: TraceFile | None) -> int:
        with bind(options.host, options.port) as listener:
            host, port = listener.getsockname()[:2]
            shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            if not is_loopback(host) and settings.api_key is None:
                _warn_of_guests(console, shown)
            name = settings.served_model_names[0]
            parts = Starting(config, options, environ, name, show, trace)
            engines = several_engines(parts, replicas) if has_replicas else one_engine(parts)
            async with engines as started:
                client = started.client
                if settings.reasoning_parser is not None:
                    check_marks(client.inputs.tokenizer)
                _show_engine(console, client.info, config)
                complete = replace(
                    settings,
                    allowed_hosts=allowed_hosts(chosen_hosts, options.host, host),
                    default_sampling=_default_sampling(config, client.info),
                )
                template = _chat_template(
                    client.info, options, given_template, is_embedded=is_embedded
                )
                console.print(f"\nserving {name} at {scheme}://{shown}", style="bold", markup=False)
                feed = LiveFeed(engine_facts(client.info, name))
                started.show(feed)
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
                return await _serve(started, launcher, feed, complete, template)

    path = options.record_trace  # refused before anything is loaded
    with nullcontext() if path is None else TraceFile(path, config.speculation) as trace:
        return asyncio.run(serve(trace))


async def _serve(
    started: Started,
    launcher: Launcher,
    feed: LiveFeed,
    settings: ApiSettings,
    template: ChatTemplate | None,
) -> int:
    client = started.client
    context = ApiContext(client, client.inputs, template, settings, lambda: launcher.is_draining)
    app = create_app(context, [metrics_router(started.registry), dashboard_router(feed)])
    traffic = asyncio.create_task(TrafficLog(started.metrics).run())
    try:
        return await launcher.serve(app)
    finally:
        traffic.cancel()


def _warn_of_guests(console: Console, shown: str) -> None:
    console.print(
        f"WARNING: everybody who can reach {shown} may use this server: give it a key "
        f"with --api-key-file or {API_KEY_VARIABLE}, or --host 127.0.0.1",
        style="bold red",
        markup=False,
    )


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
