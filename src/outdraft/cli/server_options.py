"""The flags of `outdraft serve` that are not the engine's."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from outdraft.core.errors import ConfigError, did_you_mean
from outdraft.server.limits import BODY_TIMEOUT_S, HEADER_TIMEOUT_S

API_KEY_VARIABLE = "OUTDRAFT_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the server is called, who may use it, and how it ends; names as in vLLM."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000
    api_key: Annotated[
        str | None,
        typer.Option(
            help=f"What clients must send. Default: what {API_KEY_VARIABLE} holds, or nothing."
        ),
    ] = None
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File that holds the key, and nothing else."
        ),
    ] = None
    ssl_certfile: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="PEM; serves HTTPS instead of HTTP."),
    ] = None
    ssl_keyfile: Annotated[
        Path | None,
        typer.Option(exists=True, dir_okay=False, help="PEM; default: it is in --ssl-certfile."),
    ] = None
    root_path: Annotated[
        str, typer.Option(help="Prefix of all paths that a proxy takes off, such as /llm.")
    ] = ""
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Web pages of other hosts that may ask (CORS): an origin, * for all, or a JSON "
            "list; repeatable. Default: none."
        ),
    ] = None
    allowed_hosts: Annotated[
        list[str] | None,
        typer.Option(
            help="Names that requests may be for; repeatable, * for any. Default: any, but on a "
            "loopback address only loopback names."
        ),
    ] = None
    enable_log_requests: Annotated[
        bool, typer.Option(help="Log each request: path, status, time, id; never its text.")
    ] = False
    profiler_config: Annotated[
        str | None,
        typer.Option(
            help='{"profiler": "torch", "torch_profiler_dir": "DIR"}: POST /start_profile and '
            "/stop_profile trace the engine's steps into DIR."
        ),
    ] = None
    header_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that a client has to send a request's headers.")
    ] = HEADER_TIMEOUT_S
    body_timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds that it then has for the body.")
    ] = BODY_TIMEOUT_S
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="What requests may call the model; repeatable. Default: its name."),
    ] = None
    chat_template: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="File with Jinja; default: the model's own."
        ),
    ] = None
    chat_template_content_format: Annotated[
        str,
        typer.Option(
            help="Form of a message's content in the template: string, openai (a list of parts), "
            "or auto: what the template can read."
        ),
    ] = "auto"
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="How the model writes its calls, hermes or llama3_json; default: none."),
    ] = None
    enable_auto_tool_choice: Annotated[
        bool | None,
        typer.Option(
            help="Whether the model may decide to call a function. Default: yes, with "
            "--tool-call-parser."
        ),
    ] = None
    reasoning_parser: Annotated[
        str | None,
        typer.Option(
            help="How the model writes what it thinks before it answers, qwen3 or deepseek_r1; "
            "default: that is part of the answer."
        ),
    ] = None
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to finish at the end.")
    ] = 30.0
    restart_engine: Annotated[
        bool, typer.Option("--restart-engine", help="Start another engine when it dies.")
    ] = False
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info"
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON.")] = False


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
        key = options.api_key_file.read_text("utf-8").strip()
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
    try:
        values: Any = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--profiler-config is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"--profiler-config must be a JSON object, got {text}")
    given = cast(dict[str, object], values)
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
