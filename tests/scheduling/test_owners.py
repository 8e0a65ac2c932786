"""Which request changes to another draft group, on small loads."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from outdraft.core.request import Request
from outdraft.core.sampling import SpeculationParams
from outdraft.scheduling.drafter_books import freest_groups, overdue_moves
from tests.scheduling.test_scheduler import request


def asking(name: str, length: int, wants_drafts: bool = True) -> Request:
    speculation = SpeculationParams(enabled=wants_drafts)
    return request(name, [1] * length, speculation=speculation)


def owned(*lengths: Sequence[int]) -> list[Request]:
    """Requests of each group, with texts of so many tokens; below 0: it wants no drafts."""
    found: list[Request] = []
    for group, of_group in enumerate(lengths):
        for length in of_group:
            found.append(asking(f"{group}-{abs(length)}", abs(length), length > 0))
            found[-1].owner = group
    return found


def moves(*lengths: Sequence[int]) -> list[tuple[str, int]]:
    running = owned(*lengths)
    return [(one.id, group) for one, group in overdue_moves(running, len(lengths))]


def test_of_an_overfull_group_the_shortest_text_goes_to_the_group_with_the_fewest():
    assert moves([9, 4, 6], [5], [7, 8]) == [("0-4", 1)]


def test_nobody_moves_while_no_group_has_two_more_than_another():
    assert moves([9, 4], [5], [7]) == []
    assert moves([], []) == []


def test_of_an_overfull_group_who_wants_no_drafts_goes_first_as_nothing_is_read_again_for_it():
    assert moves([9, -14, 6], [5]) == [("0-14", 1)]
    assert moves([9, -14, 6, 8], [5]) == [("0-6", 1)]


def test_two_who_want_drafts_do_not_share_a_group_while_another_has_none():
    assert moves([9, 4], [-5]) == [("0-4", 1)]
    assert moves([9, 4], [-5, -7]) == [("0-4", 1), ("1-5", 0)]
    assert moves([9, -4], [5, -7]) == []


def test_the_freest_groups_are_all_that_have_the_fewest():
    assert freest_groups(owned([9, 4], [5], [], []), 4, asking("", 3)) == [2, 3]


def test_a_request_goes_where_the_fewest_are_that_want_drafts_as_it_does():
    running = owned([9], [-5], [4])
    assert freest_groups(running, 3, asking("", 3)) == [1]
    assert freest_groups(running, 3, asking("", 3, wants_drafts=False)) == [0, 2]


@given(st.lists(st.lists(st.integers(-20, 20).filter(bool), max_size=6), min_size=1, max_size=4))
def test_moves_end_in_groups_that_have_at_most_one_more_than_others(lengths: list[list[int]]):
    running, num_groups = owned(*lengths), len(lengths)
    for _ in range(2 * len(running) + 1):
        found = overdue_moves(running, num_groups)
        assert sum(one.wants_drafts for one, _ in found) <= 1
        most = max(spread(running, num_groups))
        for one, group in found:
            one.owner = group
        assert max(spread(running, num_groups)) <= most  # memory is planned for no more
    assert not found
    for part in (running, [one for one in running if one.wants_drafts]):
        counts = spread(part, num_groups)
        assert max(counts) - min(counts) <= 1


def spread(running: Sequence[Request], num_groups: int) -> list[int]:
    return [sum(one.owner == group for one in running) for group in range(num_groups)]
