"""`outdraft serve`: an HTTP server with OpenAI's API, and its flags that are not the engine's."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from outdraft.cli.command import Model, engine_environment
from outdraft.cli.options import (
    EngineOptions,
    SchedulerOptions,
    json_object,
    read_config_file,
    serving_config,
    takes_options,
)
from outdraft.cli.replica_options import ReplicasOptions
from outdraft.config.fields import flag
from outdraft.core.errors import ConfigError, did_you_mean

FILE = {"exists": True, "dir_okay": False}
API_KEY_VARIABLE = "OUTDRAFT_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Address, access and end of the server; names as in vLLM."""

    host: str = flag("Address to listen on; 0.0.0.0: all.", default="127.0.0.1")
    port: int = flag("0: any that is free.", default=8000, min=0, max=65535)
    api_key: str | None = flag(
        f"What clients must send. Default: what {API_KEY_VARIABLE} holds, or nothing."
    )
    api_key_file: Path | None = flag("File that holds the key, and nothing else.", **FILE)
    ssl_certfile: Path | None = flag("PEM; serves HTTPS instead of HTTP.", **FILE)
    ssl_keyfile: Path | None = flag("PEM; default: it is in --ssl-certfile.", **FILE)
    root_path: str = flag("Prefix of all paths that a proxy takes off, such as /llm.", default="")
    allowed_origins: list[str] | None = flag(
        "Web pages of other hosts that may ask (CORS): an origin, * for all, or a JSON list; "
        "repeatable. Default: none."
    )
    allowed_hosts: list[str] | None = flag(
        "Names that requests may be for; repeatable, * for any. Default: any, but on a loopback "
        "address only loopback names."
    )
    enable_log_requests: bool = flag(
        "Log each request: path, status, time, id; never its text.", default=False
    )
    record_trace: Path | None = flag(
        "New file that gets a line of JSON for each finished request: token ids, never text; for "
        "`outdraft replay`."
    )
    profiler_config: str | None = flag(
        '{"profiler": "torch", "torch_profiler_dir": "DIR"}: POST /start_profile and '
        "/stop_profile trace the engine's steps into DIR."
    )
    header_timeout: float = flag(
        "Seconds that a client has to send a request's headers.", default=10.0, min=0.1
    )
    body_timeout: float = flag("Seconds that it then has for the body.", default=60.0, min=0.1)
    served_model_name: list[str] | None = flag(
        "What requests may call the model; repeatable. Default: its name."
    )
    chat_template: Path | None = flag("File with Jinja; default: the model's own.", **FILE)
    chat_template_content_format: str = flag(
        "Form of a message's content in the template: string, openai (a list of parts), or auto: "
        "what the template can read.",
        default="auto",
    )
    tool_call_parser: str | None = flag(
        "How the model writes its calls, hermes, llama3_json or qwen2_5_coder; default: none."
    )
    enable_auto_tool_choice: bool | None = flag(
        "Whether the model may decide to call a function. Default: yes, with --tool-call-parser."
    )
    reasoning_parser: str | None = flag(
        "How the model writes what it thinks before it answers, qwen3 or deepseek_r1; default: "
        "that is part of the answer."
    )
    drain_timeout: float = flag(
        "Seconds that running requests have to finish at the end.", default=30.0, min=0, max=86_400
    )
    restart_engine: bool = flag(
        "Start another engine when it dies.", "--restart-engine", default=False
    )
    log_level: str = flag("debug, info, warning or error.", default="info")
    log_json: bool = flag("Log lines as JSON.", "--log-json", default=False)


@takes_options
def serve(
    model: Model = None,
    *,
    config: Annotated[  # the callback has done what there is to do
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            is_eager=True,
            callback=read_config_file,
            help="TOML file whose keys are names of flags; the command line wins.",
        ),
    ] = None,
    engine: EngineOptions,
    scheduler: SchedulerOptions,
    server: ServerOptions,
    replicas: ReplicasOptions,
) -> None:
    """Serve a model over HTTP, with OpenAI's API and a page to watch it."""
    chosen = serving_config(model, engine, scheduler)
    from outdraft.cli.serving import run

    environ = engine_environment(os.environ)
    raise typer.Exit(run(chosen, server, replicas, environ, is_embedded=model is None))


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
        try:
            key = options.api_key_file.read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{source} cannot be read: {error}") from None
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
        if not value.startswith("["):
            found.append(value)
            continue
        try:
            parts: Any = json.loads(value)
        except ValueError:
            parts = None
        if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
            raise ConfigError(f"{flag} must be a text or a JSON list of texts, got {value!r}")
        found += parts
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
