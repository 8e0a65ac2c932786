"""Which of several results is the newest, and what is said of the commit that was measured."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from committed import by_setting, machine, read

NAMES = {f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}


def git(folder: Path, *arguments: str, at_s: int = 0) -> str:
    dates = {f"GIT_{who}_DATE": f"{at_s} +0000" for who in ("AUTHOR", "COMMITTER")}
    environment = os.environ | NAMES | dates
    run = {"cwd": folder, "env": environment, "check": True, "capture_output": True, "text": True}
    return subprocess.run(["git", *arguments], **run).stdout.strip()


def write(path: Path, commit: str | None = "1" * 40, is_dirty: bool | None = False) -> Path:
    where = {"commit": commit, "is_dirty": is_dirty, "processor": "Intel(R) Xeon(R) Processor"}
    path.write_text(json.dumps({"setting": 1, "environment": where}))
    return path


@pytest.fixture
def repository(tmp_path) -> Path:
    """old.json was committed before new.json, which sorts before it and was written before it."""
    git(tmp_path, "init", "--quiet")
    for name, at_s in (("old.json", 1_000_000_000), ("new.json", 1_000_000_100)):
        write(tmp_path / name)
        git(tmp_path, "add", name)
        git(tmp_path, "commit", "--quiet", "--message", name, at_s=at_s)
    os.utime(tmp_path / "new.json", (0, 0))
    return tmp_path


def newest(folder: Path) -> list[str]:
    results = [read(path) for path in sorted(folder.glob("*.json"))]
    (group,) = by_setting(results, lambda content: content["setting"])
    return [one.name for one in group]


def test_the_file_that_was_committed_last_is_the_newest(repository):
    assert newest(repository) == ["new.json", "old.json"]


def test_a_file_that_git_does_not_have_as_it_is_is_newer(repository):
    write(repository / "another.json")
    assert newest(repository) == ["another.json", "new.json", "old.json"]
    (repository / "another.json").unlink()
    write(repository / "old.json", is_dirty=True)
    assert newest(repository) == ["old.json", "new.json"]


def test_settings_are_kept_apart(repository):
    results = [read(path) for path in sorted(repository.glob("*.json"))]
    groups = by_setting(results, lambda content: id(content))
    assert [[one.name for one in group] for group in groups] == [["new.json"], ["old.json"]]


def test_what_is_known_against_a_commit_is_said(repository):
    here = git(repository, "rev-parse", "HEAD")

    def said(commit, is_dirty):
        return read(write(repository / "one.json", commit, is_dirty)).commit

    assert said(here, False) == f"commit {here[:9]}"
    assert said(here, True) == f"commit {here[:9]}, tree with changes"
    assert said("1" * 40, False) == "commit 111111111 (not in this repository)"
    assert said("1" * 40, True) == "commit 111111111 (not in this repository), tree with changes"
    assert said(None, None) == "no commit"


def test_a_processor_is_named_without_what_its_maker_adds(repository):
    assert machine(read(repository / "old.json").content) == "Intel Xeon"
