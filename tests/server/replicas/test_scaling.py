"""The number of replicas follows the load."""

import math

from hypothesis import given
from hypothesis import strategies as st

from outdraft.server.replicas.router import num_wanted

loads = st.lists(st.integers(0, 1000), min_size=1, max_size=20)
targets = st.integers(1, 64)


@given(loads, targets)
def test_as_many_as_the_load_fills(outstanding, target):
    wanted = num_wanted([float(one) for one in outstanding], len(outstanding), target)
    assert wanted == max(1, math.ceil(sum(outstanding) / target))


@given(loads, targets, st.integers(0, 10))
def test_a_replica_that_has_told_nothing_counts_as_the_others_do(outstanding, target, num_new):
    known = [float(one) for one in outstanding]
    wanted = num_wanted(known, len(known) + num_new, target)
    assert wanted >= num_wanted(known, len(known), target)
    assert wanted <= math.ceil(max(known) * (len(known) + num_new) / target) or wanted == 1


@given(st.integers(0, 30), targets)
def test_without_news_nothing_changes(num_replicas, target):
    assert num_wanted([], num_replicas, target) == max(1, num_replicas)
