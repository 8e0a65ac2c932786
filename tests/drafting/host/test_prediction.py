"""Predictions against outputs that follow them, leave them, and come back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.draft import MAX_DRAFTS, Draft, DraftAsk
from outdraft.drafting.prediction import PredictionProposer, find_end, num_equal

PROMPT = [900, 901, 902]


def array(ids) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def ask(output, prediction, max_tokens=MAX_DRAFTS, request_id="a") -> DraftAsk:
    text = array([*PROMPT, *output])
    return DraftAsk(request_id, text, max_tokens, len(PROMPT), array(prediction))


def accepted(draft: Draft, rest: list[int]) -> int:
    """How many tokens of `rest` a walk down the drafted tree finds."""
    row, depth = 0, 0
    while depth < len(rest):
        children = [
            i + 1
            for i, (token, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True))
            if parent == row and token == rest[depth]
        ]
        if not children:
            break
        row, depth = children[0], depth + 1
    return depth


def decode(output: list[int], prediction: list[int], max_tokens: int = MAX_DRAFTS) -> list[int]:
    """Tokens of each step of an engine whose target says `output`."""
    proposer, at, steps = PredictionProposer(), 0, []
    while at < len(output):
        [draft] = proposer.propose([ask(output[:at], prediction, max_tokens)])
        assert len(draft) <= max_tokens
        got = min(accepted(draft, output[at:]) + 1, len(output) - at)
        steps.append(got)
        at += got
    return steps


def text(length: int, seed: int = 0, vocab: int = 500) -> list[int]:
    return np.random.default_rng(seed).integers(0, vocab, length).tolist()


def test_a_right_prediction_is_drafted_from_the_first_token_to_the_last():
    output = text(200)
    steps = decode(output, output)
    assert sum(steps) == 200
    assert len(steps) <= 9  # 19 tokens at first, more as it proves right


@pytest.mark.parametrize("kind", ["replaced", "inserted", "left out"])
@pytest.mark.parametrize("seed", range(5))
def test_one_wrong_token_costs_one_step(kind, seed):
    output = text(120, seed)
    at = 30 + seed
    prediction = {
        "replaced": [*output[:at], 777, *output[at + 1 :]],
        "inserted": output[:at] + output[at + 1 :],  # the output has one token more
        "left out": [*output[:at], 777, *output[at:]],
    }[kind]
    assert len(decode(output, prediction)) <= len(decode(output, output)) + 2


@pytest.mark.parametrize("seed", range(5))
def test_an_output_that_goes_on_elsewhere_is_found_again(seed):
    parts = [text(60, seed), text(60, seed + 50), text(60, seed + 90)]
    output = parts[0] + parts[2]  # the middle was cut out
    steps = decode(output, parts[0] + parts[1] + parts[2])
    assert len(steps) < 40
    assert max(steps[-3:]) > 5


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    share=st.sampled_from([0.02, 0.05, 0.1]),
    max_tokens=st.sampled_from([4, 16, 63]),
)
def test_some_wrong_tokens_leave_most_of_the_gain(seed, share, max_tokens):
    output = text(300, seed)
    rng = np.random.default_rng(seed)
    is_wrong = rng.random(300) < share
    prediction = [999 if wrong else token for token, wrong in zip(output, is_wrong, strict=True)]
    num_wrong = int(is_wrong.sum())
    steps = decode(output, prediction, max_tokens)
    right = len(decode(output, output, max_tokens))
    assert sum(steps) == 300
    assert len(steps) <= 2 * right + 2.5 * num_wrong + 5


def test_a_text_that_repeats_itself_is_followed_where_it_stands():
    rng = np.random.default_rng(5)
    output = text(23, 5) * 15
    prediction = [999 if rng.random() < 0.05 else token for token in output]
    num_wrong = prediction.count(999)
    steps = decode(output, prediction)
    assert len(steps) <= len(decode(output, output)) + 2.5 * num_wrong


def test_a_repetition_that_drifted_to_the_end_of_the_prediction_is_taken_up_again():
    output = [1, 2] * 150
    rng = np.random.default_rng(3)
    prediction = [int(rng.integers(5, 900)) if rng.random() < 0.1 else token for token in output]
    assert len(decode(output, prediction[:200])) < 90


def test_a_wrong_prediction_is_soon_left_alone():
    proposer, output, prediction = PredictionProposer(), text(200, 1), text(200, 2)
    drafted = [
        len(proposer.propose([ask(output[:at], prediction)])[0]) for at in range(len(output))
    ]
    assert sum(drafted) < 100
    assert not any(drafted[40:])


def test_a_prediction_that_was_left_alone_is_taken_up_where_the_output_agrees_for_long():
    output = text(100, 1) + text(100, 2)
    steps = decode(output, text(80, 3) + text(100, 2))
    assert steps[-1] > 1
    assert len(steps) < 170


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 63),
    st.lists(st.integers(1, 6), max_size=12),
)
@settings(deadline=None)
def test_whatever_the_texts_a_draft_is_a_tree_of_predicted_tokens(
    output, prediction, max_tokens, jumps
):
    proposer, at = PredictionProposer(), 0
    for jump in [0, *jumps]:
        at = min(at + jump, len(output))
        [draft] = proposer.propose([ask(output[:at], prediction, max_tokens)])
        assert len(draft) <= max_tokens
        assert set(draft.token_ids) <= set(prediction)
        heads = [t for t, up in zip(draft.token_ids, draft.parents, strict=True) if up == 0]
        assert len(set(heads)) == len(heads)
        assert 0 <= draft.score <= len(draft)


def test_requests_do_not_know_each_other_and_a_finished_one_is_forgotten():
    proposer, one, other = PredictionProposer(), text(50, 1), text(50, 2)
    for at in (0, 5, 20):
        asks = [ask(one[:at], one, 8, "a"), ask(other[:at], other, 8, "b")]
        first, second = proposer.propose(asks)
        assert list(first.token_ids) == one[at : at + 8]
        assert list(second.token_ids) == other[at : at + 8]
    proposer.finish("a", None)
    proposer.finish("unknown", None)
    [again] = proposer.propose([ask([], other, 8, "a")])
    assert list(again.token_ids) == other[:8]


def test_an_id_that_comes_again_with_a_shorter_text_starts_again():
    proposer, one = PredictionProposer(), text(50, 1)
    proposer.propose([ask(one[:20], one)])
    [draft] = proposer.propose([ask(one[:3], one, 8)])
    assert list(draft.token_ids) == one[3:11]


def brute_end(prediction, output, expected, max_match):
    best = (-1, 0)
    for place in range(1, len(prediction)):
        length = 0
        while length < min(max_match, place, len(output)):
            if prediction[place - 1 - length] != output[-1 - length]:
                break
            length += 1
        nearer = abs(place - expected) < abs(best[0] - expected)
        if length > best[1] or (length == best[1] > 0 and nearer):
            best = (place, length)
    return best


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=30),
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(0, 30),
)
def test_searches_equal_plain_loops(prediction, output, expected):
    got = find_end(array(prediction), array(output), expected, 5)
    assert got == brute_end(prediction, output, expected, 5)
    place = expected % (len(prediction) + 1)
    tail = prediction[place:]
    equal = next(
        (i for i, (a, b) in enumerate(zip(output, tail, strict=False)) if a != b),
        min(len(output), len(tail)),
    )
    assert num_equal(array(output), array(prediction), place) == equal
