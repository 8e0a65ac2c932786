"""Results of benchmarks as git has them: which is the newest of its setting, and what it was of."""

import json
import subprocess
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Result:
    """A file.

    Attributes:
        written_s: when it was committed last; when it was written, if git has it otherwise or not.
        commit: what was measured, and what is known against it.
    """

    name: str
    content: dict[str, Any]
    written_s: float
    commit: str


def read(path: Path) -> Result:
    content = json.loads(path.read_text())
    return Result(path.name, content, _written_s(path), _commit(path.parent, content))


def by_setting(
    results: Iterable[Result], setting: Callable[[dict[str, Any]], Hashable]
) -> list[list[Result]]:
    """The results of each setting, the newest first."""
    found: dict[Hashable, list[Result]] = {}
    for result in results:
        found.setdefault(setting(result.content), []).append(result)
    return [sorted(group, key=lambda one: -one.written_s) for group in found.values()]


def machine(content: dict[str, Any]) -> str:
    """The processor without what all of its maker's have in their names."""
    name = content["environment"]["processor"].replace("(R)", "")
    return name.removesuffix(" Processor")


def _written_s(path: Path) -> float:
    if _git(path.parent, "status", "--porcelain", "--", path.name):
        return path.stat().st_mtime
    return float(_git(path.parent, "log", "-1", "--format=%ct", "--", path.name) or 0)


def _commit(folder: Path, content: dict[str, Any]) -> str:
    where = content["environment"]
    if where["commit"] is None:
        return "no commit"
    is_here = _git(folder, "cat-file", "-t", where["commit"]) == "commit"
    notes = ["" if is_here else " (not in this repository)"]
    notes.append(", tree with changes" if where["is_dirty"] else "")
    return f"commit {where['commit'][:9]}{''.join(notes)}"


def _git(folder: Path, *arguments: str) -> str | None:
    """What it says; None: it refuses."""
    done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None
