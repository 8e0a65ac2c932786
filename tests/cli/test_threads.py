"""How OpenMP is told to wait, and that nobody's own settings are overruled."""

import torch

from outdraft.cli.threads import num_physical_cores, prepare_openmp, use_physical_cores


def test_spinning_is_bounded_when_nothing_was_said():
    environ = {"HOME": "/"}
    prepare_openmp(environ)
    assert environ == {"HOME": "/", "GOMP_SPINCOUNT": "2000"}


def test_the_users_own_way_of_waiting_is_kept():
    for name, value in (("OMP_WAIT_POLICY", "active"), ("GOMP_SPINCOUNT", "5")):
        environ = {name: value}
        prepare_openmp(environ)
        assert environ == {name: value}


def test_torch_gets_the_physical_cores_unless_told_otherwise():
    before = torch.get_num_threads()
    try:
        assert use_physical_cores({}) == num_physical_cores()
        torch.set_num_threads(1)
        assert use_physical_cores({"OMP_NUM_THREADS": "1"}) == 1
    finally:
        torch.set_num_threads(before)
