"""Parts that commands share: flags, threads, tables, and what is said about an unknown flag."""

import logging
import os
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from typer.core import TyperCommand

from outdraft import assets
from outdraft.core.errors import ConfigError
from outdraft.core.process import prepare_openmp

# Underscores in names of flags are hyphens. Help uses the whole terminal, up to this width.
CONTEXT: dict[str, Any] = {
    "token_normalize_func": lambda name: name.replace("_", "-"),
    "max_content_width": 100,
}
WORDS = ("method", "candidate", "source", "lengths", "basis")  # headings of columns without numbers

Model = Annotated[
    str | None,
    typer.Argument(
        help="Directory or hub name of a checkpoint, or a GGUF file; default: the embedded model."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Show what the start does, its seconds, and what takes how much memory.",
    ),
]


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine process: as many threads as cores, which spin a little.

    The process that serves HTTP runs on the same cores, so this is the contended case.
    """
    chosen = dict(environ)
    prepare_openmp(chosen)
    chosen.setdefault("OMP_NUM_THREADS", str(num_physical_cores()))
    return chosen


def use_physical_cores(environ: Mapping[str, str]) -> int:
    """Let torch use every core that this process may run on, unless OMP_NUM_THREADS says how many.

    Returns the number of threads. Has to come before models are loaded.
    """
    import torch

    if "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(num_physical_cores())
    return torch.get_num_threads()


def num_physical_cores() -> int:
    """Cores of this process: two threads on one core would share its vector units."""
    import psutil

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return cores


@contextmanager
def shown_log(is_wanted: bool) -> Generator[None]:
    """Meanwhile, if that is wanted, write what the engine logs to stderr, a line each."""
    logger, handler = logging.getLogger("outdraft"), logging.StreamHandler()
    level = logger.level
    if is_wanted:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def held_out(count: int) -> list[tuple[str, str]]:
    """Take `count` of the package's prompts, (path, text) each, and one more to warm up with.

    Raises:
        ConfigError: there are fewer.
    """
    prompts = assets.prompts()
    if count >= len(prompts):
        raise ConfigError(f"--prompts must be below {len(prompts)}: one more is for warming up")
    return prompts[: count + 1]


def check_output(path: Path | None, flag: str) -> None:
    """Make the folder of a file that is written at the end, which may be hours away.

    Raises:
        ConfigError: the file cannot be written.
    """
    if path is None:
        return
    is_new = not path.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be written: {error.strerror}") from None


def progress(what: str, total: int | None = None, unit: str = "it") -> "tqdm[NoReturn]":
    """A bar that a terminal shows until it ends; nothing is written into a file."""
    return tqdm(total=total, desc=what, unit=unit, leave=False, disable=None)


def wide_console(least: int) -> Console:
    """Make a console as wide as the terminal, and at least `least` letters wide: a narrower
    terminal breaks the lines, and a file has no width.
    """
    console = Console(highlight=False)
    return Console(highlight=False, width=max(console.width, least))


def table_of(
    headings: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None, **style: Any
) -> Table:
    """A table of numbers, with a cell in each row for each heading. WORDS are not broken."""
    table = Table(title=title, title_justify="left", **style)
    for heading in headings:
        is_word = heading in WORDS
        table.add_column(heading, justify="left" if is_word else "right", no_wrap=is_word)
    for row in rows:
        table.add_row(*row)
    return table


def cells_of(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> Iterator[list[str]]:
    """Cells of a table of results. `columns`: by heading, how a row's fields are written."""
    for row in rows:
        yield [cell.format(**row) for cell in columns.values()]


def pairs_of(rows: Iterable[Iterable[str]], title: str | None = None) -> Table:
    """A table without lines: names, and beside each its value."""
    return table_of((), rows, title, show_header=False, box=None, title_style="bold")


class Command(TyperCommand):
    """A command whose help never cuts a name, with one list of flags for each panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the lists; a flag that is too long for its column gets a line of its own."""
        panels: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_argument = parameter.param_type_name == "argument"
                default = "Arguments" if is_argument else "Options"
                panels[getattr(parameter, "rich_help_panel", None) or default].append(record)
        for name, records in panels.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def get_short_help_str(self, limit: int = 0) -> str:
        """The first line, whole: the list of commands wraps what is too long."""
        return (self.help or "").partition("\n")[0]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """
        Raises:
            ConfigError: a flag is unknown; the closest known one is named.
        """
        try:
            return super().parse_args(ctx, args)
        except Exception as error:
            # The error for an unknown flag, which typer does not export, is the one with this list.
            close: list[str] | None = getattr(error, "possibilities", None)
            name: str | None = getattr(error, "option_name", None)
            if name is None or not hasattr(error, "possibilities"):
                raise
            hint = f"did you mean {close[0]}? " if close else ""
            # Other engines have flags for what is an argument here.
            arguments = [one for one in self.params if one.param_type_name == "argument"]
            if name.lstrip("-") in {one.name for one in arguments}:
                hint = f"{name.lstrip('-')} is given without a flag's name. "
            raise ConfigError(
                f"unknown flag {name}: {hint}`{ctx.command_path} --help` lists all"
            ) from None
