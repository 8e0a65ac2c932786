"""Prompts for the embedded pair: held-out files, cut where the body of a function or class begins.

A prompt starts at a top-level statement and ends with a signature or with the docstring after it,
so that it reads as code that somebody has begun to write.
"""

import ast
import json
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from tokenizers import Tokenizer

MIN_TOKENS, MAX_TOKENS = 100, 300
Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Prompt:
    """Text to complete, and the file below the standard library's folder it was cut from."""

    text: str
    path: str
    num_tokens: int


def first_line(node: ast.stmt) -> int:
    """Where the statement begins, decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(decorator.lineno for decorator in decorators)])


def body_cuts(tree: ast.Module) -> list[int]:
    """Numbers of lines to end a prompt at: a definition's signature, or its docstring."""
    cuts = set()
    for node in ast.walk(tree):
        if not isinstance(node, Definition):
            continue
        first = node.body[0]
        if ast.get_docstring(node) is None and first.lineno > node.lineno:
            cuts.add(first_line(first) - 1)
        elif len(node.body) > 1:
            cuts.add(first.end_lineno)
    return sorted(cuts)


def file_prompt(
    path: str,
    text: str,
    tokenizer: Tokenizer,
    rng: np.random.Generator,
    taken: Sequence[Prompt] = (),
) -> Prompt | None:
    """A prompt that ends at a random cut and begins as early as MAX_TOKENS allows, if any does.

    taken: prompts of the same file, with which it must not overlap; if there are any, it may begin
        at a method, too.
    """
    places = [(text.index(one.text), len(one.text)) for one in taken]
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    statements: Iterable[ast.AST] = ast.walk(tree) if taken else tree.body
    of_bodies = [node for node in statements if not taken or isinstance(node, Definition)]
    starts = sorted({0} | {first_line(node) - 1 for node in of_bodies})
    for cut in rng.permutation(body_cuts(tree)):
        for start in (s for s in starts if s < cut):
            piece = "".join(lines[start:cut]).rstrip()
            if len(piece) > 8 * MAX_TOKENS:  # surely too long: not worth encoding
                continue
            num_tokens = len(tokenizer.encode(piece).ids)
            if MIN_TOKENS <= num_tokens <= MAX_TOKENS:
                at = text.index(piece)
                if any(at < begin + size and begin < at + len(piece) for begin, size in places):
                    continue
                return Prompt(piece, path, num_tokens)
            if num_tokens < MIN_TOKENS:
                break
    return None


def held_out_prompts(data: Path, count: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts in path order, each from another held-out file.

    `data` is the folder written by corpus.py, with the same Python.

    Raises:
        ValueError: fewer held-out files hold a prompt.
    """
    rng = np.random.default_rng(seed)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    library = Path(sysconfig.get_path("stdlib"))
    prompts: list[Prompt] = []
    for path in rng.permutation(json.loads((data / "held_out_paths.json").read_text())).tolist():
        text = (library / path).read_text(encoding="utf-8")
        if len(prompts) < count and (prompt := file_prompt(path, text, tokenizer, rng)):
            prompts.append(prompt)
    if len(prompts) < count:
        raise ValueError(f"asked for {count} prompts, the held-out files hold {len(prompts)}")
    return sorted(prompts, key=lambda prompt: prompt.path)


def with_further_prompts(data: Path, first: Sequence[Prompt], count: int) -> list[Prompt]:
    """The first prompts, then others of the held-out files, until there are `count` in all.

    The files take turns, and no two prompts share a place or a text. Files that hold no more are
    left out.

    Raises:
        ValueError: the files do not hold so many.
    """
    rng = np.random.default_rng(1)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    library = Path(sysconfig.get_path("stdlib"))
    open_paths: list[str] = json.loads((data / "held_out_paths.json").read_text())
    prompts = list(first)
    while len(prompts) < count:
        for path in list(open_paths):
            text = (library / path).read_text(encoding="utf-8")
            taken = [prompt for prompt in prompts if prompt.path == path]
            found = file_prompt(path, text, tokenizer, rng, taken)
            if found is None:
                open_paths.remove(path)
            elif len(prompts) < count and all(found.text != one.text for one in prompts):
                prompts.append(found)
        if not open_paths:
            raise ValueError(f"asked for {count} prompts, the files hold {len(prompts)}")
    return prompts
