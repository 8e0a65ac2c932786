"""The estimate of what plain decoding would have done, against steps whose cost is known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outdraft.server.plain_speed import WINDOW_STEPS, PlainSpeed
from tests.server.metrics.scripted import step


def speed_of(*steps) -> float:
    speed = PlainSpeed()
    for one in steps:
        speed.add(one)
    return speed.tokens_per_s


def fading(*values: float) -> float:
    """The sum in which older values count for less."""
    kept = 1 - 1 / WINDOW_STEPS
    return sum(value * kept**age for age, value in enumerate(reversed(values)))


def test_nothing_is_known_before_a_token():
    assert math.isnan(speed_of())
    assert math.isnan(speed_of(step((), prefill_rows=50)))


def test_without_drafts_the_estimate_is_the_measured_speed():
    steps = [step((0, 0), verify_s=0.5, sample_s=0.25, host_s=0.25), step((0,), verify_s=0.5)]
    assert speed_of(*steps) == pytest.approx(fading(2, 1) / fading(1.0, 0.5))


def test_a_drafted_step_costs_what_plain_steps_of_its_batch_size_did():
    plain = step((0, 0), verify_s=0.5)
    other = step((0,), verify_s=100.0)  # another batch size: no help
    drafted = step((3, 1), (3, 1), draft_s=9.0, verify_s=7.0)  # six tokens: three plain steps
    want = fading(2, 1, 6) / fading(0.5, 100.0, 3 * 0.5)
    assert speed_of(plain, other, drafted) == pytest.approx(want)


def test_plain_steps_are_averaged():
    steps = [step((0,), verify_s=1.0), step((0,), verify_s=3.0), step((2,), (1,), verify_s=9.0)]
    assert speed_of(*steps) == pytest.approx(fading(1, 1, 2) / fading(1.0, 2.0, 2 * 2.0))


def test_while_the_rows_never_vary_drafted_rows_are_taken_as_free():
    drafted = step((4,), (2,), draft_s=5.0, verify_s=1.0, sample_s=0.25, host_s=0.25)
    assert speed_of(drafted, drafted) == pytest.approx(1 / 1.5)


def test_the_cost_of_a_row_is_learned_from_steps_of_different_size():
    # verify takes 1 s and 0.1 s a row; no step was without drafts.
    steps = [step((k,), (0,), verify_s=1.0 + 0.1 * (k + 1)) for k in (2, 4)]
    speed = PlainSpeed()
    for one in steps * 400:  # the first estimates, made without a slope, have faded
        speed.add(one)
    assert speed.tokens_per_s == pytest.approx(1 / 1.1, rel=0.02)


def test_a_drafted_row_costs_at_most_its_share():
    # The second step is much dearer than its rows explain: the slope alone would go below zero.
    steps = [step((1,), (0,), verify_s=0.1), step((3,), (0,), verify_s=4.0)]
    assert speed_of(*steps) == pytest.approx(fading(1, 1) / fading(0.1, 4.0 * 1 / 4))


def test_prompt_rows_are_computed_once_however_many_tokens_the_drafts_brought():
    plain = step((0,), verify_s=0.5)
    mixed = step((2,), (2,), prefill_rows=97, verify_s=10.0)  # 100 rows; slope unknown
    assert speed_of(plain, mixed) == pytest.approx(fading(1, 3) / fading(0.5, 10.0 + 2 * 0.5))


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4), min_size=2, max_size=30),
    st.floats(0.001, 0.1),
    st.floats(0.0, 0.05),
)
def test_the_estimate_is_exact_once_every_batch_size_was_seen_plain(batches, base_s, row_s):
    """Against an engine whose verify time is a line in the rows."""

    def timed(lengths: tuple[int, ...]):
        rows = len(lengths) + sum(lengths)
        return step(lengths, lengths, draft_s=1.0, verify_s=base_s + row_s * rows)

    plain = [timed((0,) * size) for size in range(1, 5)]
    drafted = [timed(tuple(lengths)) for lengths in batches]
    tokens = [one.num_emitted for one in plain + drafted]
    seconds = [
        (base_s + row_s * len(one.draft_lengths)) * one.num_emitted / len(one.draft_lengths)
        for one in plain + drafted
    ]
    assert speed_of(*plain, *drafted) == pytest.approx(fading(*tokens) / fading(*seconds))
