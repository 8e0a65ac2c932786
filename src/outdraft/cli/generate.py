"""`outdraft generate`: one prompt, completed."""

import os
import sys
import time
from typing import Annotated

import typer

from outdraft.cli.command import Model, Verbose, shown_log
from outdraft.cli.options import (
    EngineOptions,
    SamplingOptions,
    engine_config,
    sampling_params,
    takes_options,
)
from outdraft.cli.threads import use_physical_cores
from outdraft.core.errors import RequestError


@takes_options
def generate(
    model: Model = None,
    *,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Text to complete; default: what comes on stdin."),
    ] = None,
    verbose: Verbose = False,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Complete a prompt. The text goes to stdout while it grows, the numbers to stderr."""
    sampling_params(sampling)  # what is wrong is told before the model is loaded
    config = engine_config(model, engine)
    text = prompt if prompt is not None else _stdin()
    use_physical_cores(os.environ)
    from outdraft.cli.streaming import stream, summary
    from outdraft.engine.llm import LLM

    with shown_log(verbose):
        llm = LLM.from_config(config)
    params = sampling_params(sampling, llm.get_default_sampling_params())
    llm.engine.check_request(text, params)
    started_s = time.perf_counter()
    output = stream(llm.engine, "0", text, params, lambda piece: typer.echo(piece, nl=False))
    typer.echo()
    typer.echo(summary(output, started_s), err=True)


def _stdin() -> str:
    """What is piped in, without the newline that a shell puts behind it."""
    if sys.stdin.isatty():
        raise RequestError("there is nothing to complete: use --prompt or pipe a text", "prompt")
    return sys.stdin.read().removesuffix("\n")
