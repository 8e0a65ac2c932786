"""Threads that share products: nobody waits for a helper, and no bit depends on one."""

import gc
import multiprocessing
import os
import threading
import time

import pytest
import torch
from torch import Tensor

from outdraft.kernels.native.library import Library, Team, open_library, shared_team
from outdraft.kernels.native.linear import NativeLinear, NativeProduct

NUM_OUTPUTS = 2000
LAST_UNIT = (NUM_OUTPUTS + 31) // 32 - 1  # a unit is a tile of 32 outputs
BACK_OFF = 64  # jobs at most that are done alone after a helper was late
LONGEST_BACK_OFF_S = 0.004


def library() -> Library:
    found = open_library()
    assert found is not None
    return found


def counted(team: Team, name: str) -> int:
    """Jobs shared, or units taken back from late helpers, so far."""
    return library().function(f"team_num_{name}")(team.address)


def lose_next_unit(team: Team) -> None:
    """The last unit of the next job is claimed by a helper that never finishes it."""
    library().function("team_lose_next_unit")(team.address)


def may_store_last_unit(team: Team) -> bool:
    """Whether that helper, should it come back, may store what it has."""
    function = library().function("team_may_store")
    return bool(function(team.address, LAST_UNIT))


def products(num_threads: int, num_inputs: int = 64) -> tuple[Team, NativeProduct, NativeProduct]:
    """A team, and the same product with it and alone."""
    torch.manual_seed(0)
    weight_ED = torch.randn(NUM_OUTPUTS, num_inputs)
    team = Team(library(), num_threads)
    shared = NativeLinear(team).pack_linear(weight_ED, None)
    alone = NativeLinear(Team(library(), 1)).pack_linear(weight_ED, None)
    return team, shared, alone


@pytest.mark.parametrize("num_threads", [2, 3])
def test_helpers_change_no_bit(num_threads):
    team, shared, alone = products(num_threads, 300)
    for num_rows in [1, 5, 70] * 40:
        x_TD = torch.randn(num_rows, 300)
        assert torch.equal(shared(x_TD), alone(x_TD))
    assert counted(team, "shared") > 0


def test_a_unit_that_a_helper_does_not_finish_is_computed_by_the_caller():
    team, shared, alone = products(2)
    for num_rows in (1, 5, 100):
        x_TD = torch.randn(num_rows, 64)
        before = counted(team, "late")
        while counted(team, "late") == before:  # the job behind another late helper is not shared
            lose_next_unit(team)
            assert torch.equal(shared(x_TD), alone(x_TD))
        assert not may_store_last_unit(team)
        num_shared = counted(team, "shared")
        for _ in range(BACK_OFF + 1):
            assert torch.equal(shared(x_TD), alone(x_TD))
        assert counted(team, "shared") > num_shared


def test_behind_a_late_helper_jobs_are_done_alone_until_some_milliseconds_have_gone_by():
    team, shared, _ = products(2)
    x_TD = torch.randn(5, 64)
    num_alone = 0
    for _ in range(20):
        before = counted(team, "late")
        while counted(team, "late") == before:
            lose_next_unit(team)
            shared(x_TD)
        num_shared = counted(team, "shared")
        shared(x_TD)
        num_alone += counted(team, "shared") == num_shared
        num_shared = counted(team, "shared")
        time.sleep(2 * LONGEST_BACK_OFF_S)
        shared(x_TD)
        assert counted(team, "shared") > num_shared  # rows that are rounded, products, or both
    assert num_alone > 0


def test_a_late_unit_of_any_job_is_never_missing():
    team, shared, alone = products(3)
    x_TD = torch.randn(5, 64)
    want_TE = alone(x_TD)
    for _ in range(20 * BACK_OFF):
        lose_next_unit(team)
        assert torch.equal(shared(x_TD), want_TE)
    assert counted(team, "late") >= 10


def test_threads_may_multiply_at_the_same_time():
    # Long enough that Python gives its lock away: more than a megabyte of weights.
    team, shared, alone = products(2, 256)
    inputs = [torch.randn(5, 256) for _ in range(4)]
    failures: list[int] = []

    def multiply(index: int) -> None:
        want_TE = alone(inputs[index])
        failures.extend(
            index for _ in range(200) if not torch.equal(shared(inputs[index]), want_TE)
        )

    threads = [threading.Thread(target=multiply, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert counted(team, "shared") > 0


def num_threads_of_process() -> int:
    return len(os.listdir("/proc/self/task"))


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="no list of threads here")
def test_helpers_end_with_their_team():
    before = num_threads_of_process()
    team, shared, _ = products(3)
    shared(torch.randn(1, 64))
    assert num_threads_of_process() == before + 2

    del team, shared
    gc.collect()

    assert num_threads_of_process() == before


def test_a_process_has_one_team_of_a_size():
    own = library()
    assert shared_team(own, 2) is shared_team(own, 2)
    assert shared_team(own, 1) is not shared_team(own, 2)


def _multiply_in_child(product: NativeProduct, x_TD: Tensor, want_TE: Tensor) -> None:
    os._exit(0 if torch.equal(product(x_TD), want_TE) else 1)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_computes_right_without_helpers():
    _, shared, _ = products(2)
    x_TD = torch.randn(5, 64)
    want_TE = shared(x_TD)

    child = multiprocessing.get_context("fork").Process(
        target=_multiply_in_child, args=(shared, x_TD, want_TE)
    )
    child.start()
    child.join(timeout=60)

    assert child.exitcode == 0
