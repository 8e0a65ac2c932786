"""`outdraft serve`: an HTTP server with OpenAI's API, and its flags that are not the engine's."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from outdraft.cli.command import Model, engine_environment, num_physical_cores
from outdraft.cli.options import (
    EngineOptions,
    SchedulerOptions,
    engine_config,
    read_config_file,
    takes_options,
)
from outdraft.config.engine import EngineConfig
from outdraft.config.fields import flag, json_object, read_text
from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.core.process import prepare_openmp
from outdraft.server.replicas.router import ReplicaPlan

FILE: dict[str, Any] = {"exists": True, "dir_okay": False}
API_KEY_VARIABLE = "OUTDRAFT_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Address, access and end of the server; names as in vLLM.

    Attributes:
        host: Address to listen on; 0.0.0.0: all.
        port: 0: any that is free.
        api_key: What clients must send. Default: what OUTDRAFT_API_KEY holds, or nothing.
        api_key_file: File that holds the key, and nothing else.
        ssl_certfile: PEM; serves HTTPS instead of HTTP.
        ssl_keyfile: PEM; default: it is in --ssl-certfile.
        root_path: Prefix of all paths that a proxy takes off, such as /llm.
        allowed_origins: Web pages of other hosts that may ask (CORS): an origin, * for all, or a
            JSON list; repeatable. Default: none.
        allowed_hosts: Names that requests may be for; repeatable, * for any. Default: any, but on a
            loopback address only loopback names.
        enable_log_requests: Log each request: path, status, time, id; never its text.
        record_trace: New file that gets a line of JSON for each finished request: token ids, never
            text; for `outdraft replay`.
        profiler_config: {"profiler": "torch", "torch_profiler_dir": "DIR"}: POST /start_profile and
            /stop_profile trace the engine's steps into DIR.
        header_timeout: Seconds that a client has to send a request's headers.
        body_timeout: Seconds that it then has for the body.
        served_model_name: What requests may call the model; repeatable. Default: its name.
        chat_template: File with Jinja; default: the model's own.
        chat_template_content_format: Form of a message's content in the template: string, openai (a
            list of parts), or auto: what the template can read.
        tool_call_parser: How the model writes its calls, hermes, llama3_json or qwen2_5_coder;
            default: none.
        enable_auto_tool_choice: Whether the model may decide to call a function. Default: yes, with
            --tool-call-parser.
        reasoning_parser: How the model writes what it thinks before it answers, qwen3 or
            deepseek_r1; default: that is part of the answer.
        drain_timeout: Seconds that running requests have to finish at the end.
        restart_engine: Start another engine when it dies.
        log_level: debug, info, warning or error.
        log_json: Log lines as JSON.
    """

    host: str = "127.0.0.1"
    port: int = flag(default=8000, min=0, max=65535)
    api_key: str | None = None
    api_key_file: Path | None = flag(**FILE)
    ssl_certfile: Path | None = flag(**FILE)
    ssl_keyfile: Path | None = flag(**FILE)
    root_path: str = ""
    allowed_origins: list[str] | None = None
    allowed_hosts: list[str] | None = None
    enable_log_requests: bool = False
    record_trace: Path | None = None
    profiler_config: str | None = None
    header_timeout: float = flag(default=10.0, min=0.1)
    body_timeout: float = flag(default=60.0, min=0.1)
    served_model_name: list[str] | None = None
    chat_template: Path | None = flag(**FILE)
    chat_template_content_format: str = "auto"
    tool_call_parser: str | None = None
    enable_auto_tool_choice: bool | None = None
    reasoning_parser: str | None = None
    drain_timeout: float = flag(default=30.0, min=0, max=86_400)
    restart_engine: bool = flag("--restart-engine", default=False)
    log_level: str = "info"
    log_json: bool = flag("--log-json", default=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasOptions:
    """Number of engines, and their machines; several need `pip install 'outdraft[ray]'`.

    Attributes:
        data_parallel_size: Engines (replicas) that share the requests; with autoscaling: at the
            start.
        min_replicas: Fewest replicas of autoscaling. Default: --data-parallel-size.
        max_replicas: Most replicas of autoscaling. Default: --data-parallel-size.
        target_requests: Requests waiting or running, a replica, at which autoscaling aims.
        upscale_delay: Seconds for which more replicas are wanted before autoscaling starts them.
        downscale_delay: Seconds for which fewer replicas are wanted before autoscaling ends the
            others.
        replica_cpus: Cores of a replica, which computes with as many threads. Default: its share of
            this machine's cores; 1 on a GPU.
        replica_timeout: Seconds without a sign of life after which a replica counts as lost.
        replica_port: Port at which replicas call this server; 0: any that is free.
        ray_address: Cluster of Ray to run replicas on: an address, or local. Default: what
            RAY_ADDRESS names, or what `ray start` has started on this machine, or else local: this
            machine alone.
    """

    data_parallel_size: int = flag(default=1, min=1)
    min_replicas: int | None = flag(min=1)
    max_replicas: int | None = flag(min=1)
    target_requests: float = flag(default=16.0, min=0.1)
    upscale_delay: float = flag(default=30.0, min=0)
    downscale_delay: float = flag(default=600.0, min=0)
    replica_cpus: int | None = flag(min=1)
    replica_timeout: float = flag(default=5.0, min=1)
    replica_port: int = flag(default=0, min=0, max=65535)
    ray_address: str | None = None

    @property
    def has_replicas(self) -> bool:
        """True if there is more than the server's one engine."""
        return self.data_parallel_size > 1 or self.max_replicas is not None


@takes_options
def serve(
    model: Model = None,
    *,
    config: Annotated[  # the callback has done what there is to do
        Path | None, typer.Option(is_eager=True, callback=read_config_file, **FILE)
    ] = None,
    engine: EngineOptions,
    scheduler: SchedulerOptions,
    server: ServerOptions,
    replicas: ReplicasOptions,
) -> None:
    """Serve a model over HTTP, with OpenAI's API and a page to watch it.

    Args:
        config: TOML file whose keys are names of flags; the command line wins.
    """
    chosen = engine_config(model, engine, scheduler)
    from outdraft.cli.serving import run

    environ = engine_environment(os.environ)
    raise typer.Exit(run(chosen, server, replicas, environ, is_embedded=model is None))


def replica_plan(
    options: ReplicasOptions,
    server: ServerOptions,
    config: EngineConfig,
    environ: Mapping[str, str],
    has_gpus: bool,
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
        log_level=server.log_level.upper(),
        drain_timeout_s=server.drain_timeout,
    )


def api_key(options: ServerOptions, environ: Mapping[str, str]) -> str | None:
    """The key, wherever it was given: a flag wins over the environment.

    Raises:
        ConfigError: it was given by two flags, or it is empty.
    """
    if options.api_key is not None and options.api_key_file is not None:
        raise ConfigError("--api-key and --api-key-file exclude each other")
    source, key = API_KEY_VARIABLE, environ.get(API_KEY_VARIABLE)
    if options.api_key is not None:
        source, key = "--api-key", options.api_key
    elif options.api_key_file is not None:
        source = f"--api-key-file {options.api_key_file}"
        key = read_text(options.api_key_file, source).strip()
    if key == "":
        raise ConfigError(f"{source} is empty: give a key, or none")
    return key


def listed(values: Iterable[str] | None, flag: str) -> tuple[str, ...]:
    """The values of a repeatable flag, some of which may be JSON lists, as in vLLM.

    Raises:
        ConfigError: one begins as a list and is none of texts.
    """
    found: list[str] = []
    for value in values or ():
        try:
            found += msgspec.json.decode(value, type=list[str]) if value[:1] == "[" else [value]
        except msgspec.MsgspecError:
            raise ConfigError(
                f"{flag} must be a text or a JSON list of texts, got {value!r}"
            ) from None
    return tuple(found)


def profiler_dir(text: str | None) -> Path | None:
    """The directory that --profiler-config names, with vLLM's keys.

    Raises:
        ConfigError: it is no JSON, has an unknown key, or lacks one.
    """
    if text is None:
        return None
    given: dict[str, object] = json_object(text, "--profiler-config")
    known = ("profiler", "torch_profiler_dir")
    for name in given:
        if name not in known:
            raise ConfigError(
                f"--profiler-config: unknown key {name!r}: {did_you_mean(name, known)}"
            )
    if given.get("profiler", "torch") != "torch":
        raise ConfigError(f"--profiler-config: profiler must be 'torch', got {given['profiler']!r}")
    folder = given.get("torch_profiler_dir")
    if not isinstance(folder, str) or not folder:
        raise ConfigError("--profiler-config: torch_profiler_dir must name a directory")
    return Path(folder).expanduser().absolute()
