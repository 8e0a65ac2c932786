"""Which cores a rank gets, on made-up machines."""

import pytest

from outdraft.loading.machine import Cores, cores_of_ranks, topology

# Two sockets of four cores with two logical processors each, numbered as Linux does.
TWO_SOCKETS = {cpu: (cpu // 4 % 2, cpu % 4) for cpu in range(16)}


def test_two_ranks_on_two_sockets_have_one_each():
    first, second = cores_of_ranks(2, 8, TWO_SOCKETS)
    assert (first.num_threads, second.num_threads) == (4, 4)
    assert {TWO_SOCKETS[cpu][0] for cpu in first.cpus} == {0}
    assert {TWO_SOCKETS[cpu][0] for cpu in second.cpus} == {1}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_no_core_has_two_ranks_and_every_core_has_one(size: int):
    parts = cores_of_ranks(size, 8, TWO_SOCKETS)
    owners: dict[tuple[int, int], set[int]] = {}
    for rank, part in enumerate(parts):
        for cpu in part.cpus:
            owners.setdefault(TWO_SOCKETS[cpu], set()).add(rank)
    assert set(owners) == set(TWO_SOCKETS.values())
    assert all(len(ranks) == 1 for ranks in owners.values())
    assert sum(len(part.cpus) for part in parts) == len(TWO_SOCKETS)


def test_ranks_share_the_threads_that_were_asked_for():
    assert [one.num_threads for one in cores_of_ranks(4, 6, TWO_SOCKETS)] == [1] * 4
    assert [one.num_threads for one in cores_of_ranks(2, 1, TWO_SOCKETS)] == [1] * 2


def test_more_ranks_than_cores_run_anywhere():
    assert cores_of_ranks(3, 2, {0: (0, 0), 1: (0, 1)}) == [Cores(1)] * 3
    assert cores_of_ranks(2, 2, {}) == [Cores(1)] * 2


def test_a_machine_that_does_not_tell_its_cores_has_no_topology(tmp_path):
    assert topology(tmp_path) == {}
