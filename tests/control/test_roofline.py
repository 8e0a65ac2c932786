"""The prior, against numbers computed by hand."""

import numpy as np
import pytest

from outdraft.control.roofline import Machine, PassSize, prior_table

# 1 GB/s; 100 Gop/s; a million weights of two bytes: 2 ms to read, 20 us for each row.
MACHINE = Machine(bandwidth=1e9, peak=1e11)
TARGET = PassSize(2_000_000, 2_000_000, token_bytes=4000, num_layers=10)
DRAFTER = PassSize(200_000, 200_000, token_bytes=400, num_layers=1)
ROWS = (1, 64, 100, 200, 1000)


def test_a_pass_is_bound_by_its_bytes_and_then_by_its_operations():
    seconds = [TARGET.seconds(rows, MACHINE) for rows in ROWS]
    assert seconds == pytest.approx([2e-3, 2e-3, 2e-3, 4e-3, 20e-3])


def test_launches_bound_it_from_below_and_calls_come_on_top():
    machine = Machine(1e9, 1e11, layer_s=300e-6, call_s=50e-6)
    assert TARGET.seconds(1, machine) == pytest.approx(3050e-6)
    assert TARGET.seconds(1000, machine) == pytest.approx(20050e-6)
    assert DRAFTER.seconds(1, machine) == pytest.approx(350e-6)


def test_a_table_of_a_pair():
    table = prior_table(MACHINE, TARGET, {"eagle3": (DRAFTER, 7)}, ROWS)
    assert table.target.rows == ROWS
    assert table.target.at(np.array([64, 150])) == pytest.approx([2e-3, 3e-3])
    assert table.context_s == pytest.approx(4e-6)
    drafter = table.drafters["eagle3"]
    assert drafter.max_passes == 7
    assert drafter.context_s == pytest.approx(4e-7)
    assert drafter.passes.at(np.array([1, 1000])) == pytest.approx([200e-6, 2e-3])
    assert drafter.catch_up.at(np.array([0, 1, 200])) == pytest.approx([0, 0, 200e-6])
