"""The flags of `outdraft serve` that are not the engine's."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """What the server is called, who may use it, and how it ends; names as in vLLM."""

    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 8000
    api_key: Annotated[
        str | None, typer.Option(help="What clients must send; default: nothing.")
    ] = None
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
    tool_call_parser: Annotated[
        str | None,
        typer.Option(help="How the model writes its calls, hermes or llama3_json; default: none."),
    ] = None
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds that running requests have to finish at the end.")
    ] = 30.0
    restart_engine: Annotated[
        bool, typer.Option("--restart-engine", help="Start another engine when it dies.")
    ] = False
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info"
    log_json: Annotated[bool, typer.Option("--log-json", help="Log lines as JSON.")] = False
