"""Which tests run, and how.

What a pairwise cover leaves out needs `--full`, GPU tests need a GPU; without one, Triton's kernels
are interpreted.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which any test of this process may be the first to do.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what pairwise covers leave out")


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
