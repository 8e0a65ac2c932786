"""No sentence in comments, docstrings, messages or documents begins with "Of"."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("src", "tests", "recipes", "benchmarks")
PYTHON = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
KERNELS = sorted((ROOT / "csrc").glob("*.*"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.md")])
# Behind the end of a sentence, at the beginning of a text, a paragraph, or a cell of a table.
OF = re.compile(r"(?:\A|[.!?:|]\s+|\n\s*\n\s*)[`*_\"]*(Of\s[^.]{0,40})")

BLOCK = re.compile(r"^(?:[ ]*//.*\n?)+|//.*", re.MULTILINE)  # of C++: lines, or what is beside code


def texts(path: Path) -> Iterator[str]:
    """Comments, one by one or as blocks of lines, and everything in quotes."""
    source = path.read_text("utf-8")
    if path.suffix == ".md":
        yield source
        return
    if path.suffix in (".cpp", ".h"):
        for lines in BLOCK.findall(source):
            yield " ".join(line.lstrip(" /") for line in lines.splitlines())
        return
    block: list[str] = []
    last = (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start != (last[0] + 1, last[1]):  # the next line, at the same column
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("# "))
            last = token.start
    yield " ".join(block)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def found(path: Path) -> list[str]:
    return [match for text in texts(path) for match in OF.findall(text)]


@pytest.mark.slow
def test_no_sentence_begins_with_of():
    own = Path(__file__)
    guilty = {str(path.relative_to(ROOT)): found(path) for path in (*PYTHON, *KERNELS, *DOCUMENTS)}
    guilty.pop(str(own.relative_to(ROOT)))
    assert {name: sentences for name, sentences in guilty.items() if sentences} == {}


@pytest.mark.parametrize(
    "text",
    [
        *("# Of equals", "x = 1  # a. Of b", "x = 1  # a\n# Of b"),
        *('"""A b.\n\n    Of c."""', 'h(help="Of it.")'),
    ],
)
def test_each_kind_of_text_is_looked_at(text: str, tmp_path: Path):
    path = tmp_path / "one.py"
    path.write_text(f"{text}\n")
    assert len(found(path)) == 1
    path.write_text("# One of b. All of c\n")
    assert found(path) == []


@pytest.mark.parametrize("text", ["// Of a", "int a;  // a. Of b", "  // a b.\n  // Of c"])
def test_comments_of_kernels_are_looked_at(text: str, tmp_path: Path):
    path = tmp_path / "one.cpp"
    path.write_text(f"{text}\nint b;  // One of b.\n")
    assert len(found(path)) == 1
