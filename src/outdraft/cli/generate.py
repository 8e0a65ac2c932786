"""`outdraft generate`: one prompt, completed. `outdraft chat`: a conversation in the terminal."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from outdraft.cli.command import Model, Verbose, shown_log, use_physical_cores
from outdraft.cli.options import (
    EngineOptions,
    SamplingOptions,
    engine_config,
    sampling_params,
    takes_options,
)
from outdraft.core.errors import ConfigError, RequestError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams

if TYPE_CHECKING:
    from outdraft.engine.engine import Engine


@takes_options
def generate(
    model: Model = None,
    *,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p")] = None,
    verbose: Verbose = False,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Complete a prompt. The text goes to stdout while it grows, the numbers to stderr.

    Args:
        prompt: Text to complete; default: what comes on stdin.
    """
    sampling_params(sampling)  # errors come before the model is loaded
    config = engine_config(model, engine)
    text = prompt if prompt is not None else _stdin()
    use_physical_cores(os.environ)
    from outdraft.engine.llm import LLM

    with shown_log(verbose):
        llm = LLM.from_config(config)
    params = sampling_params(sampling, llm.get_default_sampling_params())
    llm.engine.check_request(text, params)
    summary = stream(llm.engine, "0", text, params, lambda piece: typer.echo(piece, nl=False))
    typer.echo(summary, err=True)


def _stdin() -> str:
    """Text that is piped in, without the newline that a shell adds at its end."""
    if sys.stdin.isatty():
        raise RequestError("there is nothing to complete: use --prompt or pipe a text", "prompt")
    return sys.stdin.read().removesuffix("\n")


@takes_options
def chat(
    model: Annotated[str, typer.Argument()],
    *,
    system: str | None = None,
    verbose: Verbose = False,
    engine: EngineOptions,
    sampling: SamplingOptions,
) -> None:
    """Talk with a model. Ctrl-C ends an answer, Ctrl-D the conversation.

    Args:
        model: Directory or hub name of a checkpoint with a chat template.
        system: Text that the model reads first.
    """
    sampling_params(sampling)  # errors come before the model is loaded
    config = engine_config(model, engine)
    use_physical_cores(os.environ)
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
        pieces: list[str] = []

        def show(piece: str, pieces: list[str] = pieces) -> None:
            pieces.append(piece)
            typer.echo(piece, nl=False)

        try:
            typer.echo(f"({stream(llm.engine, str(len(messages)), ids, params, show)})", err=True)
        except KeyboardInterrupt:
            typer.echo()
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _ask() -> str | None:
    """Read the next line of the user; None at the end of the input. A pipe gets answers alone."""
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


def stream(
    engine: "Engine",
    request_id: str,
    prompt: str | Sequence[int],
    params: SamplingParams,
    show: Callable[[str], None],
) -> str:
    """Run one request to its end, give each new piece of its text to `show`, and sum it up.

    An exception, Ctrl-C included, aborts the request.

    Raises:
        RequestError: it can never run.
        GenerationError: it failed while it ran.
    """
    from outdraft.bench.driver import complete_alone

    started_s, shown = time.perf_counter(), 0

    def show_more(output: RequestOutput) -> None:
        nonlocal shown
        text = output.outputs[0].text
        if len(text) > shown:
            show(text[shown:])
            shown = len(text)

    output = complete_alone(engine, request_id, prompt, params, show_more).output
    typer.echo()
    num_tokens = len(output.outputs[0].token_ids)
    elapsed_s = time.perf_counter() - started_s
    speculation = output.metrics.speculative_decoding
    parts = [f"{num_tokens} tokens in {elapsed_s:.2f} s ({num_tokens / elapsed_s:.1f} tokens/s)"]
    if speculation.num_spec_steps:
        parts.append(f"acceptance rate {speculation.draft_acceptance_rate:.0%}")
        parts.append(f"acceptance length {speculation.mean_acceptance_length:.2f}")
    return ", ".join(parts)
