"""How rows of a step are shared out among draft groups."""

from hypothesis import given
from hypothesis import strategies as st

from outdraft.drafting.device.live_stop import caps_of_groups

PLANNED = st.lists(st.integers(0, 40), min_size=1, max_size=8).filter(any)


@given(st.integers(0, 300), st.integers(0, 30), PLANNED)
def test_groups_share_all_rows_of_a_cap_in_proportion_to_their_plans(
    row_cap: int, num_host_rows: int, planned: list[int]
):
    caps = caps_of_groups(row_cap, num_host_rows, planned)
    left = max(0, row_cap - num_host_rows)
    allowed = [min(cap - num_host_rows, own) for cap, own in zip(caps, planned, strict=True)]
    assert sum(allowed) == min(left, sum(planned))
    for rows, own in zip(allowed, planned, strict=True):
        assert abs(rows - min(left, sum(planned)) * own / sum(planned)) < 1
