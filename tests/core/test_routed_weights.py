"""How many experts rows meet, against drawn routes."""

import numpy as np
import pytest

from outdraft.core.weights import RoutedWeights, distinct_experts


@pytest.mark.parametrize(("num_experts", "per_row"), [(8, 2), (32, 4), (128, 8)])
def test_distinct_experts_are_those_of_drawn_routes_on_average(num_experts, per_row):
    rng = np.random.default_rng(0)
    for num_rows in (1, 2, 5, 20):
        order = rng.random((2000, num_rows, num_experts)).argpartition(per_row, axis=2)
        met = np.zeros((2000, num_experts), bool)
        np.put_along_axis(met, order[:, :, :per_row].reshape(2000, -1), values=True, axis=1)
        want = met.sum(1).mean()
        assert distinct_experts(num_experts, per_row, num_rows) == pytest.approx(want, rel=0.01)


def test_a_step_reads_a_rows_share_and_at_most_all():
    routed = RoutedWeights(nbytes=1600, num_experts=16, per_row=4)
    assert routed.bytes_read(np.array([0, 1, 1000])) == pytest.approx([0, 400, 1600])
