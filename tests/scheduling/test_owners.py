"""Which request changes to another draft group, on small loads."""

from collections.abc import Sequence

from outdraft.core.request import Request
from outdraft.scheduling.owners import freest_groups, overdue_move
from tests.scheduling.test_scheduler import request


def owned(*lengths: Sequence[int]) -> list[Request]:
    """Requests of each group, with texts of so many tokens."""
    found: list[Request] = []
    for group, of_group in enumerate(lengths):
        for length in of_group:
            found.append(request(f"{group}-{length}", [1] * length))
            found[-1].owner = group
    return found


def test_of_an_overfull_group_the_shortest_text_goes_to_the_group_with_the_fewest():
    running = owned([9, 4, 6], [5], [7, 8])
    move = overdue_move(running, 3)
    assert move is not None
    assert (move[0].id, move[1]) == ("0-4", 1)


def test_nobody_moves_while_no_group_has_two_more_than_another():
    assert overdue_move(owned([9, 4], [5], [7]), 3) is None
    assert overdue_move([], 2) is None


def test_the_freest_groups_are_all_that_have_the_fewest():
    assert freest_groups(owned([9, 4], [5], [], []), 4) == [2, 3]
