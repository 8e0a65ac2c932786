"""How often sources of the host look, by what looks win."""

import pytest

from outdraft.control.looks import AWAKE, LATELY, LEAST, LONG_RUN, LONGEST_DEAR, PROMISE, Looks
from outdraft.control.looks import SLEEPY as REFUSED


def judged(looks: Looks, worth: float, count: int, *, is_taken: bool = True) -> Looks:
    """So many looks, each of which wins so many tokens."""
    for _ in range(count):
        looks.judge(1.5 + worth, 1.5, 0.0, is_taken=is_taken)
    return looks


def rare() -> Looks:
    looks = judged(Looks(), LEAST - 0.01, LONG_RUN)
    looks.cost(0.02, 0.16)
    return looks


def num_due(looks: Looks, num_steps: int = 64) -> int:
    return sum(looks.are_due(step) for step in range(num_steps))


def test_looks_that_win_go_on():
    looks = judged(Looks(), LEAST + 0.01, 10 * LONG_RUN)
    looks.cost(0.02, 0.16)
    assert not looks.are_rare
    assert num_due(looks) == 64


def test_looks_that_win_less_than_they_take_become_rare():
    looks = judged(Looks(), LEAST - 0.01, LONG_RUN - 1)
    assert not looks.are_rare
    assert num_due(rare()) == 64 // 16


@pytest.mark.parametrize(
    ("looking", "deciding", "apart"), [(0, 0, 1), (0.03, 0.01, 3), (0, 9, LONGEST_DEAR)]
)
def test_they_are_as_rare_as_makes_them_take_a_hundredth_of_the_time(looking, deciding, apart):
    looks = rare()
    looks.cost(looking, deciding)
    assert num_due(looks, 32 * apart) == 32


def test_a_rich_step_is_followed_by_another_look():
    looks = rare()
    looks.judge(3.0, 1.5, 1.0, is_taken=True)
    assert [looks.due_in(step) for step in range(1, 4)] == [0, 0, 0]
    looks.judge(1.5, 1.5, 0.0, is_taken=True)
    assert looks.due_in(1) == 15


def test_looks_that_win_again_become_common():
    assert judged(rare(), PROMISE - 0.01, 10 * LATELY).are_rare
    assert judged(rare(), PROMISE + 0.01, LATELY - 1).are_rare
    assert not judged(rare(), PROMISE + 0.01, LATELY).are_rare


def test_what_a_network_wins_is_not_won_by_looks():
    """A network drafts at a gain of a half, with a look and without."""
    looks = Looks()
    for _ in range(20 * LONG_RUN):
        looks.judge(3.0, 2.1, 0.5, is_taken=False)
    assert looks.are_rare


def test_refused_offers_make_looks_rare_and_drafts_keep_them_going():
    looks = Looks()
    looks.cost(0.02, 0.16)
    for _ in range(REFUSED):
        assert not looks.are_rare
        looks.refuse()
    assert num_due(looks) == 64 // 16
    looks.take()
    for _ in range(AWAKE):
        assert not looks.are_rare
        looks.refuse()
    assert looks.are_rare
