"""What is learned about acceptance is what is true."""

import math

import numpy as np
import pytest

from outdraft.control.chances import Curve, HostCurves
from outdraft.control.facts import DraftOutcome

CHANCES = (0.8, 0.7, 0.6, 0.5)


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def draft(rng, chances):
    """How many levels are accepted."""
    return int((rng.random(len(chances)) < chances).cumprod().sum())


def learn(curve, rng, chances, num_drafts, request_id="a"):
    for _ in range(num_drafts):
        curve.observe([DraftOutcome(request_id, len(chances), draft(rng, chances))])


def test_chances_of_all_levels_are_found():
    for seed in range(5):
        curve = Curve(0.6, 4)
        learn(curve, np.random.default_rng(seed), CHANCES, 1500)
        survivals = curve.survivals("a", 4)
        assert survivals == pytest.approx(np.cumprod(CHANCES), abs=0.1)


def test_before_anything_is_seen_the_prior_holds_at_all_levels():
    assert Curve(0.7, 3).survivals("a", 3) == pytest.approx([0.7, 0.49, 0.343])


def test_levels_that_are_not_reached_follow_the_ones_above():
    curve = Curve(0.6, 4)
    learn(curve, np.random.default_rng(0), (0.9, 0.9), 300)
    assert curve.chances[3] > 0.75


def test_a_fall_of_acceptance_is_noticed_within_forty_drafts():
    for seed in range(10):
        curve, rng = Curve(0.6, 4), np.random.default_rng(seed)
        learn(curve, rng, CHANCES, 1000)
        learn(curve, rng, (0.2, 0.2, 0.2, 0.2), 40)
        assert curve.survivals("a", 1)[0] < 0.5


def test_a_rise_of_acceptance_is_noticed_within_forty_drafts():
    for seed in range(10):
        curve, rng = Curve(0.6, 4), np.random.default_rng(seed)
        learn(curve, rng, (0.2, 0.2, 0.2, 0.2), 1000)
        learn(curve, rng, (0.9, 0.9, 0.9, 0.9), 40)
        assert curve.survivals("a", 1)[0] > 0.6


def test_requests_that_differ_are_told_apart():
    curve, rng = Curve(0.6, 3), np.random.default_rng(0)
    for _ in range(150):
        for request_id, chances in (("easy", (0.9, 0.9, 0.9)), ("hard", (0.3, 0.3, 0.3))):
            learn(curve, rng, chances, 1, request_id)
    assert curve.survivals("easy", 1)[0] == pytest.approx(0.9, abs=0.08)
    assert curve.survivals("hard", 1)[0] == pytest.approx(0.3, abs=0.1)
    # The deep levels, which easy requests alone reach, do not look better than they are.
    assert curve.survivals("hard", 3)[2] < 0.1
    curve.forget("easy")
    assert curve.survivals("easy", 1) == curve.survivals("new", 1)


def live_world(rng, num_levels):
    """Margins and chances of the levels of one draft."""
    margins = rng.exponential(2, num_levels)
    return margins, [sigmoid(0.8 * margin - 0.5) for margin in margins]


def test_the_live_rule_knows_the_chance_behind_a_margin():
    curve, rng = Curve(0.6, 2), np.random.default_rng(1)
    for _ in range(2000):
        margins, chances = live_world(rng, 2)
        curve.observe([DraftOutcome("a", 2, draft(rng, chances), tuple(margins))])
    rule = curve.live_stop("a", 2, 0.5, 9)
    assert rule is not None
    for margin in (0.5, 2.0, 4.0):
        score = rule.weights[0] * margin + rule.biases[0]
        assert sigmoid(score) == pytest.approx(sigmoid(0.8 * margin - 0.5), abs=0.08)


def test_the_live_rule_follows_what_is_doubted():
    curve, rng = Curve(0.6, 2), np.random.default_rng(1)
    for _ in range(400):
        margins, chances = live_world(rng, 2)
        curve.observe([DraftOutcome("a", 2, draft(rng, chances), tuple(margins))])
    before, chance = curve.live_stop("b", 2, 0.5, 9), curve.chances[0]
    curve.doubt_all(1.0)
    after = curve.live_stop("b", 2, 0.5, 9)
    moved = math.log(curve.chances[0] / (1 - curve.chances[0])) - math.log(chance / (1 - chance))
    assert abs(moved) > 0.05
    assert before is not None
    assert after is not None
    assert after.biases[0] - before.biases[0] == pytest.approx(moved)


def mean_estimate(seed, *, tells_the_end):
    """The first level's chance as learned while a live rule leaves out what is below 0.6."""
    curve, rng, estimates = Curve(0.6, 2), np.random.default_rng(seed), []
    for step in range(3000):
        margins, chances = live_world(rng, 2)
        rule = curve.live_stop("a", 2, 0.5, 9) if step > 500 else None
        drafted, survival = 2, 1.0
        for level in range(2 if rule is not None else 0):
            survival *= sigmoid(rule.weights[level] * margins[level] + rule.biases[level])
            if survival < 0.6:
                drafted = level
                break
        seen = tuple(margins[: drafted + tells_the_end])
        accepted = draft(rng, chances[:drafted]) if drafted else 0
        curve.observe([DraftOutcome("a", drafted, accepted, seen)])
        estimates.append(curve.survivals("a", 1)[0])
    return np.mean(estimates[1000:])


def test_levels_do_not_look_better_because_the_live_rule_left_poor_ones_out():
    rng = np.random.default_rng(5)
    mean = np.mean([live_world(rng, 1)[1][0] for _ in range(20000)])
    for seed in range(3):
        assert mean_estimate(seed, tells_the_end=True) == pytest.approx(mean, abs=0.04)
        assert mean_estimate(seed, tells_the_end=False) > mean + 0.06


def test_without_margins_there_is_no_live_rule():
    curve = Curve(0.6, 2)
    learn(curve, np.random.default_rng(0), (0.5, 0.5), 200)
    assert not curve.knows_margins


def survivals(source: HostCurves, match_length: int, num_levels: int) -> list[float]:
    return source.curve(match_length).survivals("", num_levels)


def test_host_sources_are_learned_by_the_length_of_their_match():
    source, rng = HostCurves(), np.random.default_rng(0)
    for _ in range(400):
        source.observe(2, 3, draft(rng, (0.3, 0.3, 0.3)))
        source.observe(16, 3, draft(rng, (0.9, 0.9, 0.9)))
    assert survivals(source, 3, 2) == pytest.approx([0.3, 0.09], abs=0.08)
    assert survivals(source, 20, 3) == pytest.approx([0.9, 0.81, 0.73], abs=0.08)
    # A match of a length never seen lies between them.
    assert 0.4 < survivals(source, 5, 1)[0] < 0.8


def test_before_anything_is_seen_longer_matches_are_trusted_more_and_given_texts_all_alike():
    chances = [survivals(HostCurves(), length, 1)[0] for length in (1, 2, 4, 8, 16, 32, 64)]
    assert chances == sorted(chances)
    assert chances[0] < 0.4
    assert chances[-1] > 0.8
    given = HostCurves(is_given=True)
    assert survivals(given, 1, 3) == survivals(given, 64, 3)
    assert survivals(given, 1, 3) == pytest.approx([0.75, 0.5625, 0.421875])


def test_what_a_host_source_shows_with_short_matches_is_told_of_long_ones_too():
    source = HostCurves()
    before = survivals(source, 32, 1)[0]
    for _ in range(60):
        source.observe(1, 2, 0)
    assert survivals(source, 32, 1)[0] < 0.7 * before


def test_a_host_source_that_got_worse_is_noticed_within_forty_offers():
    for seed in range(10):
        source, rng = HostCurves(), np.random.default_rng(seed)
        for _ in range(1000):
            source.observe(4, 4, draft(rng, CHANCES))
        for _ in range(40):
            source.observe(4, 4, draft(rng, (0.2, 0.2, 0.2, 0.2)))
        assert survivals(source, 4, 1)[0] < 0.45


def test_hopeless_levels_are_left_out_of_survivals():
    source = HostCurves()
    assert len(survivals(source, 4, 5)) == 5
    assert 5 < len(survivals(source, 4, 63)) < 63


def test_a_few_labels_move_a_request_less_than_many():
    curve, rng = Curve(0.6, 3), np.random.default_rng(3)
    for number in range(40):
        learn(curve, rng, (0.6,) * 3, 10, f"r{number}")
    usual = curve.survivals("unknown", 1)[0]
    learn(curve, rng, (1.0,) * 3, 2, "few")
    learn(curve, rng, (1.0,) * 3, 40, "many")
    few, many = (curve.survivals(name, 1)[0] for name in ("few", "many"))
    assert usual + 0.02 < few < many - 0.05


def test_a_shape_is_hoped_for_again_when_it_was_long_unseen():
    curve, rng = Curve(0.6, 3), np.random.default_rng(5)
    learn(curve, rng, [0.6] * 3, 300)
    assert curve.doubt == 0
    for _ in range(1000):
        curve.miss()
    assert curve.doubt > 0.8
    learn(curve, rng, [0.6] * 3, 40)
    assert curve.doubt < 0.2


def test_labels_of_a_shape_that_was_long_unseen_count_for_little():
    curve, rng = Curve(0.6, 3), np.random.default_rng(5)
    learn(curve, rng, [0.3] * 3, 300)
    for _ in range(2000):
        curve.miss()
    learn(curve, rng, [0.95] * 3, 12, "b")
    assert curve.chances[0] > 0.6
