"""How OpenMP is told to wait, and that nobody's own settings are overruled."""

import os
import subprocess
import sys

import pytest
import torch

from outdraft.cli.command import num_physical_cores, use_physical_cores
from outdraft.core.process import prepare_openmp


def test_spinning_is_bounded_when_nothing_was_said():
    environ = {"HOME": "/"}
    prepare_openmp(environ)
    assert environ == {"HOME": "/", "GOMP_SPINCOUNT": "2000"}


def test_the_users_own_way_of_waiting_is_kept():
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "5")):
        environ = {name: value}
        prepare_openmp(environ)
        assert environ == {name: value}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="GNU's OpenMP is Linux's")
def test_it_is_bounded_before_a_name_of_the_package_brings_torch():
    """GNU's OpenMP shows its settings when it is loaded."""
    environ = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    environ.pop("OMP_WAIT_POLICY", None)
    code = "import outdraft, sys; assert 'torch' not in sys.modules; outdraft.LLM"
    command, environ = [sys.executable, "-c", code], environ | {"OMP_DISPLAY_ENV": "VERBOSE"}
    shown = subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stderr
    assert "GOMP_SPINCOUNT = '2000'" in shown


def test_torch_gets_the_physical_cores_unless_told_otherwise():
    before = torch.get_num_threads()
    try:
        assert use_physical_cores({}) == num_physical_cores()
        torch.set_num_threads(1)
        assert use_physical_cores({"OMP_NUM_THREADS": "1"}) == 1
    finally:
        torch.set_num_threads(before)
