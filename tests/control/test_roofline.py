"""The prior, against numbers computed by hand."""

import numpy as np
import pytest

from outdraft.control.roofline import Launches, Machine, PassSize, prior_table

# 1 GB/s; 100 Gop/s; a million weights of two bytes: 2 ms to read, 20 us for each row.
MACHINE = Machine(bandwidth=1e9, peak=1e11)
TARGET = PassSize(2_000_000, 2_000_000, token_bytes=4000, num_layers=10)
DRAFTER = PassSize(200_000, 200_000, token_bytes=400, num_layers=1)
ROWS = (1, 64, 100, 200, 1000)


def test_a_pass_is_bound_by_its_bytes_and_then_by_its_operations():
    ridge = 2**0.25  # a fifth more where reading and multiplying take as long
    expected_ms = [2, (2**4 + 1.28**4) ** 0.25, 2 * ridge, (2**4 + 4**4) ** 0.25, 20]
    seconds = TARGET.curve(MACHINE, ROWS).seconds
    assert seconds == pytest.approx([ms / 1e3 for ms in expected_ms], rel=1e-4)


def test_launches_bound_it_from_below_and_calls_come_on_top():
    machine = Machine(1e9, 1e11, Launches(floor_s=300e-6), call_s=50e-6)
    ends = (1, 1000)
    assert TARGET.curve(machine, ends).seconds == pytest.approx([3050e-6, 20050e-6], rel=1e-4)
    assert DRAFTER.curve(machine, ends).seconds[0] == pytest.approx(350e-6)


def test_kernels_that_begin_and_end_add_to_a_pass_however_long_it_computes():
    launches = Launches(floor_s=3.0, more_s=2.0)
    assert launches.around(np.array([10.0, 40.0]), 5).tolist() == [25.0, 50.0]


def test_a_table_of_a_pair():
    table = prior_table(MACHINE, TARGET, {"eagle3": (DRAFTER, 7)}, ROWS)
    assert table.target.rows == ROWS
    between = (table.target.seconds[2] + table.target.seconds[3]) / 2
    assert table.target.at(np.array([150])) == pytest.approx([between])
    assert table.context_s == pytest.approx(4e-6)
    drafter = table.drafters["eagle3"]
    assert drafter.max_passes == 7
    assert drafter.context_s == pytest.approx(4e-7)
    assert drafter.passes.at(np.array([1, 1000])) == pytest.approx([200e-6, 2e-3], rel=1e-4)
    more = drafter.passes.seconds[3] - drafter.passes.seconds[0]
    assert drafter.catch_up.at(np.array([0, 1, 200])) == pytest.approx([0, 0, more])
