"""`outdraft serve`: an HTTP server with OpenAI's API."""

import os
from pathlib import Path
from typing import Annotated

import typer

from outdraft.cli.command import Model
from outdraft.cli.options import (
    EngineOptions,
    SchedulerOptions,
    read_config_file,
    serving_config,
    takes_options,
)
from outdraft.cli.replica_options import ReplicasOptions
from outdraft.cli.server_options import ServerOptions
from outdraft.cli.threads import engine_environment


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
