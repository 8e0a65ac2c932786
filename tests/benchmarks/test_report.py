"""What the documents show is what the files say that they name."""

import json
import re
from pathlib import Path

import pytest
from committed import Result
from report import RESULTS, table, write
from roofline_table import roofline_table
from sweep_table import sweep_table

ROOT = Path(__file__).parents[2]
MEASURING = (ROOT / "docs" / "measuring.md").read_text("utf-8")
ROOFLINES = [path for path in RESULTS.glob("roofline-*.json") if "1-thread" not in path.name]
SWEEPS = [*RESULTS.glob("sweep-*.json")]


def section(name: str) -> str:
    return MEASURING.split(f"<!-- {name}: begin -->\n")[1].split(f"<!-- {name}: end -->")[0]


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("|")]


def shown(text: str) -> list[Result]:
    """The files of which rows are, in the order of the page."""
    names = re.findall(r"^- `([^`]+)`", text, re.MULTILINE)
    return [Result(name, json.loads((RESULTS / name).read_text()), 0.0, "") for name in names]


def test_only_what_stands_between_the_marks_is_replaced(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n<!-- y: begin -->")
    write(page, "x", "new\n")
    assert page.read_text() == "a\n<!-- x: begin -->\nnew\n<!-- x: end -->\nb\n<!-- y: begin -->"


@pytest.mark.parametrize("path", sorted(RESULTS.glob("decode-*.json")), ids=lambda path: path.name)
def test_tables_of_methods_are_those_of_the_files(path):
    assert table(json.loads(path.read_text())) in section("measured")


@pytest.mark.parametrize(
    ("name", "written", "paths"),
    [("sweeps", sweep_table, SWEEPS), ("roofline", roofline_table, ROOFLINES)],
    ids=["sweeps", "roofline"],
)
def test_rows_are_those_of_the_files_that_are_named_and_no_file_is_forgotten(name, written, paths):
    """`python benchmarks/report.py` writes them anew."""
    text = section(name)
    assert rows(text) == rows(written(shown(text)))
    assert set(re.findall(r"`([^`]+\.json)`", text)) == {path.name for path in paths}
