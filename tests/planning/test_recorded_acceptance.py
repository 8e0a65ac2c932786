"""What a trace tells about a network: counts by level, levels of trees, and each request's own."""

import pytest

from outdraft.core.draft import DraftSource
from outdraft.core.recorded import RecordedStep
from outdraft.planning.recorded_acceptance import (
    RecordedAcceptance,
    level_chances,
    network_drafts,
    recorded_networks,
)
from tests.planning.recording import made_up


def steps(*drafts: tuple[int, int], source: str = "eagle3") -> list[RecordedStep]:
    return [
        RecordedStep(1 + accepted, {source: drafted}, {source: accepted})
        for drafted, accepted in drafts
    ]


def request(*drafts: tuple[int, int], source: str = "eagle3", tree: tuple[int, ...] = ()):
    count = sum(1 + accepted for _, accepted in drafts)
    return made_up(list(range(count)), steps(*drafts, source=source), tree=tree)


def test_a_level_counts_where_the_levels_above_were_accepted():
    chances, labels = level_chances([(3, 0), (3, 2), (2, 2), (1, 1)] * 1000)
    assert labels == [4000, 2000, 1000]
    assert chances == pytest.approx([3 / 4, 1, 0], abs=0.01)


def test_many_labels_make_a_chance_and_few_lean_on_the_level_above():
    (first, second), _ = level_chances([*((1, number % 4 != 0) for number in range(1000)), (2, 2)])
    assert first == pytest.approx(0.75, abs=0.01)
    assert second == pytest.approx(first, abs=0.03)


@pytest.mark.parametrize(
    ("rows", "accepted", "levels"), [(2, 0, 1), (5, 1, 2), (6, 3, 3), (4, 1, 1), (4, 2, 2)]
)
def test_rows_of_a_tree_are_levels(rows: int, accepted: int, levels: int):
    one = request((rows, accepted), tree=(2, 3, 1))
    assert list(network_drafts(DraftSource.EAGLE3, one)) == [(levels, accepted)]


def test_networks_are_those_that_drafted():
    requests = [request((2, 1)), request((2, 1), source="suffix")]
    assert recorded_networks(requests) == [DraftSource.EAGLE3]
    assert list(network_drafts(DraftSource.EAGLE3, requests[1])) == []


def test_an_easy_request_stays_easier_than_a_hard_one():
    easy, hard = request(*[(1, 1)] * 200), request(*[(1, 0)] * 200)
    network = RecordedAcceptance(DraftSource.EAGLE3, [easy, hard])
    lucky = [
        sum(network.accepted(index, "block", 5, place, 1) for place in range(400))
        for index in (0, 1)
    ]
    assert lucky[0] > 350
    assert lucky[1] < 50


def test_luck_belongs_to_a_text_and_a_place():
    one = request(*[(3, number % 4) for number in range(60)])
    network, again = (RecordedAcceptance(DraftSource.EAGLE3, [one]) for _ in range(2))
    places = range(300)
    forwards = [network.accepted(0, "block", 1, place, 3) for place in places]
    backwards = [again.accepted(0, "block", 1, place, 3) for place in reversed(places)]
    assert forwards == backwards[::-1]
    assert forwards != [network.accepted(0, "block", 2, place, 3) for place in places]
