"""When a request ends, and for what reason."""

import pytest

from outdraft.core.request import FinishReason, Request
from outdraft.core.sampling import SamplingParams


def request(max_model_len: int = 100, stop: tuple[int, ...] = (), **params):
    return Request(
        "r",
        [7, 8],
        SamplingParams(**params),
        seed=0,
        max_model_len=max_model_len,
        stop_token_ids=frozenset(stop),
    )


def test_the_last_token_that_fits_ends_the_request():
    one = request(max_tokens=2)
    assert one.append(1) is None
    assert one.append(2) is FinishReason.LENGTH
    assert one.token_ids[one.num_prompt :].tolist() == [1, 2]
    assert one.token_ids.tolist() == [7, 8, 1, 2]


def test_the_models_length_bounds_the_output_too():
    one = request(max_model_len=3, max_tokens=50)
    assert one.append(1) is FinishReason.LENGTH


@pytest.mark.parametrize(
    ("max_tokens", "num_output", "expected"), [(5, 0, 4), (5, 3, 1), (5, 4, 0)]
)
def test_drafts_leave_room_for_the_token_behind_them(max_tokens, num_output, expected):
    one = request(max_tokens=max_tokens)
    for _ in range(num_output):
        one.append(1)
    assert one.max_drafts == expected


def test_only_a_stop_token_that_was_asked_for_is_the_reason():
    asked, end_of_text = request(stop=(3,), stop_token_ids=[3]), request(stop=(3,))
    assert asked.append(3) is FinishReason.STOP
    assert asked.stop_reason == 3
    assert end_of_text.append(3) is FinishReason.STOP
    assert end_of_text.stop_reason is None


def test_nothing_stops_before_the_fewest_tokens():
    one = request(stop=(3,), min_tokens=3)
    assert one.append(3) is None
    assert one.append(3) is None
    assert one.append(3) is FinishReason.STOP
