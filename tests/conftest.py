"""Which tests run, and how.

There are two lanes. `--full` runs every test. Without it these are left out: tests marked `full`,
and of a test marked `few(n)` all but n cases, spread over its list. GPU tests need a GPU; without
one, Triton's kernels are interpreted. No property has a time limit.
"""

import os
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from outdraft.costs.file import default_folder

# How long an example takes, or to draw one, says how busy the machine is.
settings.register_profile(
    "any_machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any_machine")

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which any test of this process may be the first to do.
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def own_cost_tables(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch):
    """Engines keep what they measured for this run of the tests, not for the user."""
    folder = tmp_path_factory.getbasetemp() / "costs"
    monkeypatch.setattr("outdraft.costs.table.default_folder", lambda: folder)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what pairwise covers leave out")
    parser.addoption(
        "--published",
        choices=["smollm2", "all"],
        default="smollm2",
        help="which published models are tested",
    )
    parser.addoption(
        "--published-folder",
        type=Path,
        default=default_folder() / "published",
        help="where the published models' files are, or come to be",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        kept = chosen([item for item in items if not item.get_closest_marker("full")])
        left_out = [item for item in items if item not in kept]
        items[:] = [item for item in items if item in kept]
        config.hook.pytest_deselected(items=left_out)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def chosen(items: list[pytest.Item]) -> set[pytest.Item]:
    """Tests without those cases that the marker `few` leaves out."""
    kept, cases = set(items), defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("few"):
            cases[item.nodeid.split("[")[0]].append(item)
    for every in cases.values():
        count = every[0].get_closest_marker("few").args[0]
        places = {round(place * (len(every) - 1) / max(1, count - 1)) for place in range(count)}
        kept -= {item for place, item in enumerate(every) if place not in places}
    return kept


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that takes more of the processor than an unmarked one may.

    A test should take at most 2 s. The limit leaves room for processors of half that speed.
    """
    began_s = time.process_time()
    result = yield
    may_take_longer = any(
        map(item.get_closest_marker, ("slow", "full", "gpu", "network", "cluster", "published"))
    )
    if (taken_s := time.process_time() - began_s) > 5 and not may_take_longer:
        pytest.fail(f"took {taken_s:.1f} s of the processor: mark it `slow`, or make it faster")
    return result
