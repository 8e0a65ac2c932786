"""What a newcomer reads first: help, and what is said about flags that do not exist."""

import io

import pytest
from rich.console import Console
from typer.main import get_command

from outdraft import LLM, assets
from outdraft.bench.side_by_side import PLAIN
from outdraft.cli.app import app
from outdraft.cli.demo import DemoView
from tests.cli.pair import completed, pair


def commands() -> dict[tuple[str, ...], object]:
    """Every command by its words."""
    found, group = {}, get_command(app)
    for name, command in group.commands.items():
        found[(name,)] = command
        found |= {(name, inner): one for inner, one in getattr(command, "commands", {}).items()}
    return found


@pytest.mark.parametrize("width", ["60", "80", "200"])
@pytest.mark.parametrize("words", commands())
def test_help_cuts_no_name_at_any_width(command, words, width):
    result = command.invoke(app, [*words, "--help"], env={"COLUMNS": width})
    assert result.exit_code == 0
    assert "…" not in result.output
    assert "..." not in result.output.replace("[ARGS]...", "")
    for parameter in commands()[words].params:
        for spelling in (*parameter.opts, *parameter.secondary_opts):
            assert spelling in result.output.split() or f"{spelling}," in result.output.split()


def test_the_list_of_commands_is_not_cut(command):
    result = command.invoke(app, ["--help"], env={"COLUMNS": "80"})
    shown = " ".join(result.output.split())
    for words, one in commands().items():
        if len(words) == 1:
            assert f"{words[0]} {one.help.splitlines()[0]}" in shown


def test_flags_are_listed_by_what_they_are_about(command):
    lines = command.invoke(app, ["serve", "--help"]).output.splitlines()
    headings = [line for line in lines if line[:1].isalpha() and line.endswith(":")]
    assert headings == ["Arguments:", "Options:", "Engine:", "Scheduler:", "Server:", "Replicas:"]


@pytest.mark.parametrize(
    ("arguments", "closest"),
    [
        (["generate", "--tempurature", "1"], "--temperature"),
        (["generate", "--max_tokns", "1"], "--max-tokens"),
        (["serve", "m", "--prot=1"], "--port"),
        (["bench", "methods", "--promts", "1"], "--prompts"),
    ],
)
def test_an_unknown_flag_is_one_line_that_names_the_closest(command, arguments, closest):
    result = command.invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: unknown flag --")
    assert f"did you mean {closest}?" in result.stderr
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["generate", "--model", "m"], ["serve", "--model=m"]])
def test_who_gives_the_model_by_a_flag_is_told_that_it_has_none(command, arguments):
    result = command.invoke(app, arguments)
    assert result.exit_code == 2
    assert "unknown flag --model: model is given without a flag's name" in result.stderr
    assert "did you mean" not in result.stderr


def test_a_flag_that_is_like_no_other_points_to_help(command):
    result = command.invoke(app, ["generate", "--quux"])
    assert result.exit_code == 2
    assert "did you mean" not in result.stderr
    assert "generate --help" in result.stderr


def test_underscores_in_flags_are_hyphens_and_values_keep_theirs(command):
    arguments = ["generate", str(pair().target), "-p", "def add(", "--dtype", "float32"]
    arguments += ["--kv_cache_memory_bytes", "256Ki", "--temperature", "0", "--stop", "a_b"]
    hyphens = [*arguments, "--max-tokens", "4", "--enable-prefix-caching"]
    underscores = [*arguments, "--max_tokens=4", "--enable_prefix_caching"]
    first, second = command.invoke(app, hyphens), command.invoke(app, underscores)
    assert first.exit_code == second.exit_code == 0
    assert first.stdout == second.stdout
    assert "4 tokens" in second.stderr


@pytest.mark.parametrize("flags", [[], ["-v"], ["--verbose"]])
def test_the_memory_plan_is_shown_on_request_only(command, flags):
    arguments = ["generate", str(pair().target), "-p", "def add(", "--max-tokens", "2"]
    result = command.invoke(app, [*arguments, "--dtype", "float32", *flags])
    assert result.exit_code == 0
    assert ("KV cache: " in result.stderr) == bool(flags)
    if not flags:
        assert result.stderr.count("\n") == 1  # the summary


def test_a_bar_that_nobody_watches_is_not_drawn(capfd):
    llm = LLM(str(pair().target), dtype="float32", device="cpu", num_blocks=64)
    llm.generate(["def add(", "return"])
    assert capfd.readouterr().err == ""


def test_the_demos_table_fits_into_80_columns():
    llm = LLM(str(pair().target), dtype="float32", device="cpu", num_blocks=64)
    written = io.StringIO()
    names = [PLAIN, "draft_model", *assets.HEADS, "suffix", "ngram", "combined"]
    compared = {name: [completed([], 12345, 1.23)] for name in names}
    DemoView(Console(file=written, width=80), llm, ()).footer(compared, 0.7, 1.0)
    shown = written.getvalue()
    assert "…" not in shown
    for name in (*names, "tokens/s", "TPOT ms", "acceptance", "identical"):
        assert name in shown
