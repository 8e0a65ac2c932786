"""Which tests run, and how.

What a pairwise cover leaves out needs `--full`, GPU tests need a GPU; without one, Triton's kernels
are interpreted. No property has a time limit.
"""

import os
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
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
