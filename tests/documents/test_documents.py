"""What the documents show exists: files, commands, flags, configurations."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from outdraft.cli.app import app
from outdraft.config.speculation import parse_speculative_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in DOCUMENTS}


def test_the_readme_is_short_and_keeps_the_place_of_its_table():
    readme = TEXTS["README.md"]
    assert len(readme.splitlines()) <= 180
    assert readme.index("<!-- published: begin -->") < readme.index("<!-- published: end -->")


@pytest.mark.parametrize("name", TEXTS)
def test_links_lead_to_files(name: str):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXTS[name])
    local = [target for target in targets if not re.match(r"https?://", target)]
    assert [target for target in local if not ((ROOT / name).parent / target).exists()] == []


def commands() -> list[tuple[str, str]]:
    """Every line of a code block that calls outdraft, without its comment."""
    lines = [
        (name, line.split("  #")[0])
        for name, text in TEXTS.items()
        for block in re.findall(r"```[a-z]*\n(.*?)```", text, re.DOTALL)
        for line in block.splitlines()
        if line.startswith("outdraft ")
    ]
    assert len(lines) > 20
    return lines


@pytest.mark.parametrize(("name", "line"), commands())
def test_commands_and_their_flags_exist(name: str, line: str):
    command, words = typer.main.get_command(app), shlex.split(line)[1:]
    while words and words[0] in getattr(command, "commands", {}):
        command = command.commands[words.pop(0)]
    assert not hasattr(command, "commands"), f"{name}: no such command: {line}"
    known = {flag for parameter in command.params for flag in parameter.opts}
    assert {word for word in words if word.startswith("-")} <= known
    for flag, value in itertools.pairwise(words):
        if flag == "--speculative-config":
            parse_speculative_config(with_model(json.loads(value)))


def test_configurations_of_the_table_are_understood():
    cells = re.findall(r"^\| `(\{.*?\})` \|", TEXTS["docs/drafting.md"], re.MULTILINE)
    assert len(cells) > 8
    for cell in cells:
        parse_speculative_config(json.loads(cell))


def with_model(values: dict | None) -> dict | None:
    """The embedded networks need no name on the command line."""
    if values is None or values.get("method") in ("ngram", "suffix", "combined"):
        return values
    return {"model": "embedded"} | values
