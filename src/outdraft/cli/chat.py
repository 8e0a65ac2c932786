"""`outdraft chat`: a conversation in the terminal."""

import os
import sys
import time
from typing import Annotated

import typer

from outdraft.cli.command import Verbose, shown_log
from outdraft.cli.options import (
    EngineOptions,
    SamplingOptions,
    engine_config,
    sampling_params,
    takes_options,
)
from outdraft.cli.threads import use_physical_cores
from outdraft.core.errors import ConfigError


@takes_options
def chat(
    model: Annotated[
        str, typer.Argument(help="Directory or hub name of a checkpoint with a chat template.")
    ],
    *,
    system: Annotated[str | None, typer.Option(help="What the model is told first.")] = None,
    verbose: Verbose = False,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk with a model. Ctrl-C ends an answer, Ctrl-D the conversation."""
    sampling_params(sampling)  # what is wrong is told before the model is loaded
    config = engine_config(model, engine)
    use_physical_cores(os.environ)
    from outdraft.cli.streaming import stream, summary
    from outdraft.engine.llm import LLM
    from outdraft.loading.models import tokenizer_path
    from outdraft.models.checkpoints.files import resolve_model_path
    from outdraft.text.chat import ChatTemplate

    path = resolve_model_path(config.model, config.revision)
    template = ChatTemplate.from_directory(tokenizer_path(config, path))
    if template is None:
        raise ConfigError(f"{model} brings no chat template: use `outdraft generate`")
    with shown_log(verbose):
        llm = LLM.from_config(config)
    params = sampling_params(sampling, llm.get_default_sampling_params())
    tokenizer = llm.models.tokenizer
    if tokenizer is None:
        raise ConfigError(f"{model} brings no tokenizer.json: name one with --tokenizer")
    messages = [] if system is None else [{"role": "system", "content": system}]
    while (question := _ask()) is not None:
        messages.append({"role": "user", "content": question})
        # The template writes the special tokens itself; the tokenizer must not add them again.
        ids = tokenizer.encode(template.render(messages), add_special_tokens=False).ids
        started_s = time.perf_counter()
        pieces: list[str] = []

        def show(piece: str, pieces: list[str] = pieces) -> None:
            pieces.append(piece)
            typer.echo(piece, nl=False)

        try:
            output = stream(llm.engine, str(len(messages)), ids, params, show)
            typer.echo()
            typer.echo(f"({summary(output, started_s)})", err=True)
        except KeyboardInterrupt:
            typer.echo()
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _ask() -> str | None:
    """What the user says next; None at the end of the input. A pipe gets answers alone."""
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            if is_terminal:
                typer.echo()
            return None
        if line:
            return line
