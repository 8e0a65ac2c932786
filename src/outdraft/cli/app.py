"""The commands, and what becomes of their errors."""

from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

from outdraft.cli.bench import bench
from outdraft.cli.chat import chat
from outdraft.cli.command import CONTEXT, Command
from outdraft.cli.demo import demo
from outdraft.cli.doctor import doctor
from outdraft.cli.generate import generate
from outdraft.cli.plan import plan
from outdraft.cli.replay import replay
from outdraft.cli.selftest import selftest
from outdraft.cli.serve import serve
from outdraft.cli.tune import tune
from outdraft.core.errors import ConfigError, OutdraftError, RequestError


class Commands(TyperGroup):
    """Turns the errors that outdraft raises on purpose into one line and an exit code.

    2: what was asked for cannot be done, as for a flag that does not exist. 1: it failed.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OutdraftError as error:
            line = " ".join(str(error).split())
            console = Console(stderr=True, highlight=False, soft_wrap=True)
            console.print("error:", style="bold red", end=" ")
            console.print(line, markup=False)
            is_asked_wrong = isinstance(error, ConfigError | RequestError)
            raise typer.Exit(2 if is_asked_wrong else 1) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its tables cut long names
    context_settings=CONTEXT,
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from outdraft.loading.machine import installed_version

        typer.echo(f"outdraft {installed_version('outdraft') or 'not installed'}")
        raise typer.Exit


@app.callback()
def _options(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print it and go."),
    ] = False,
) -> None:
    """LLM inference in which speculative decoding is the normal way to execute."""


for _command in (generate, chat, serve, demo, doctor, plan, tune, replay, selftest):
    app.command(cls=Command)(_command)
app.add_typer(bench, name="bench")
