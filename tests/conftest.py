"""Tests that need a GPU are skipped where there is none, and Triton's kernels are interpreted."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton reads it when it is imported, which any test of this process may be the first to do.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)
