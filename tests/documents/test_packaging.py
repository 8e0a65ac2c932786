"""Bounds of dependencies are those that the tests can speak for."""

import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = {
    canonicalize_name(one.name): Version(next(iter(one.specifier)).version)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
    for one in [Requirement(line)]
}


@pytest.mark.parametrize("written", PROJECT["dependencies"])
def test_the_lower_bound_is_the_release_that_the_tests_run_with(written: str):
    requirement = Requirement(written)
    (bound,) = requirement.specifier
    pinned = PINNED[canonicalize_name(requirement.name)]
    assert bound.operator == ">="
    assert Version(bound.version).release == pinned.release[:2]
