"""The prior, against numbers computed by hand."""

import numpy as np
import pytest

from outdraft.control.roofline import ROWS as PRIOR_ROWS
from outdraft.control.roofline import MachineLimits, PassSize, pass_s, prior_table
from outdraft.core.weights import RoutedWeights

# 1 GB/s; 100 Gop/s; a million weights of two bytes: 2 ms to read, 20 us for each row.
MACHINE = MachineLimits(bandwidth=1e9, peak=1e11)
TARGET = PassSize(2_000_000, 2_000_000, token_bytes=4000, num_layers=10)
DRAFTER = PassSize(200_000, 200_000, token_bytes=400, num_layers=1)
ROWS = (1, 64, 100, 200, 1000)


def test_a_pass_is_bound_by_its_bytes_and_then_by_its_operations():
    ridge = 2**0.25  # a fifth more where reading and multiplying take as long
    expected_ms = [2, (2**4 + 1.28**4) ** 0.25, 2 * ridge, (2**4 + 4**4) ** 0.25, 20]
    seconds = TARGET.curve(MACHINE, ROWS).seconds
    assert seconds == pytest.approx([ms / 1e3 for ms in expected_ms], rel=1e-4)


def test_launches_bound_it_from_below_and_calls_come_on_top():
    machine = MachineLimits(1e9, 1e11, 300e-6, call_s=50e-6)
    ends = (1, 1000)
    assert TARGET.curve(machine, ends).seconds == pytest.approx([3050e-6, 20050e-6], rel=1e-4)
    assert DRAFTER.curve(machine, ends).seconds[0] == pytest.approx(350e-6)


def test_kernels_that_begin_and_end_add_to_a_pass_however_long_it_computes():
    assert pass_s(np.array([10.0, 40.0]), 5, launch_s=3.0, begin_s=2.0).tolist() == [25.0, 50.0]


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


def test_a_pass_reads_those_experts_that_its_rows_meet():
    """Ten of eleven parts of the weights are experts, of which a row meets a quarter."""
    routed = RoutedWeights(20_000_000, num_experts=8, per_row=2)
    size = PassSize(2_000_000, 10, token_bytes=0, num_layers=1, routed=routed)
    met_R = [1 / 4, 7 / 16, 37 / 64, 1]
    assert size.curve(MACHINE, (1, 2, 3, 1000)).seconds == pytest.approx(
        [2e-3 + 20e-3 * met for met in met_R], rel=1e-4
    )


@pytest.mark.parametrize(("num_experts", "per_row"), [(4, 1), (8, 2), (32, 4), (128, 8), (256, 8)])
def test_between_the_points_of_a_table_experts_are_found_within_a_few_percent(num_experts, per_row):
    """The cost of experts is concave in rows: lines between points are below it, a little."""
    routed = RoutedWeights(1_000_000_000, num_experts, per_row)
    size = PassSize(0, 1, token_bytes=0, num_layers=1, routed=routed)
    rows_R = np.arange(1, 513)
    want_R = np.array(size.curve(MACHINE, tuple(rows_R.tolist())).seconds)
    found_R = size.curve(MACHINE, PRIOR_ROWS).at(rows_R)
    assert (found_R <= want_R * (1 + 1e-9)).all()
    assert (found_R >= 0.95 * want_R).all()
