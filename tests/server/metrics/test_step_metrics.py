"""What steps add up to, worked out by hand."""

import math
import random
from dataclasses import replace

import pytest
from msgspec import structs

from outdraft.core.decision import Alarm, AlarmKind, Decision, Reason
from outdraft.core.draft import DraftSource
from outdraft.core.plan import StepStats
from tests.server.metrics.scripted import INFO, Exposed, metrics, report, step


def test_gauges_show_the_last_report():
    counted = metrics()
    counted.observe_steps(report(running=5, waiting=9, kv_usage=0.75))
    counted.observe_steps(report(running=3, waiting=2, kv_usage=0.25))
    exposed = Exposed(counted)
    assert exposed.value("num_requests_running") == 3
    assert exposed.value("num_requests_waiting") == 2
    assert exposed.value("kv_cache_usage_perc") == 0.25


def test_tokens_and_drafts_are_added_up():
    counted = metrics()
    counted.observe_steps(report(step((3, 2, 0), (2, 0, 0)), step((0,))))
    counted.observe_steps(report(step((3, 3), (3, 1), source=DraftSource.MODEL)))
    exposed = Exposed(counted)
    assert exposed.value("generation_tokens_total") == 5 + 1 + 6
    assert exposed.value("spec_decode_num_drafts_total") == 2 + 2
    assert exposed.value("spec_decode_num_draft_tokens_total") == 5 + 6
    assert exposed.value("spec_decode_num_accepted_tokens_total") == 2 + 4
    at = [
        exposed.value("spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
        for i in range(3)
    ]
    assert at == [1 + 2, 1 + 1, 0 + 1]


def test_tokens_and_drafts_are_told_apart_by_source():
    counted = metrics()
    counted.observe_steps(report(step((3,), (2,)), step((3, 1), (0, 1), source=DraftSource.MODEL)))
    exposed = Exposed(counted)

    def by_source(what: str) -> list[float]:
        name = f"spec_decode_{what}_total"
        return [exposed.value(name, source=source) for source in INFO.speculation_methods]

    assert INFO.speculation_methods == ["prediction", "suffix", "draft_model"]
    assert by_source("draft_tokens_by_source") == [0, 3, 4]
    assert by_source("accepted_tokens_by_source") == [0, 2, 1]
    assert by_source("drafts_by_source") == [0, 1, 2]


def test_a_source_that_the_engine_did_not_name_is_counted_when_it_drafts():
    counted = metrics()
    counted.observe_steps(report(step((2,), (1,), source=DraftSource.MEDUSA)))
    name = "spec_decode_draft_tokens_by_source_total"
    assert Exposed(counted).value(name, source="medusa") == 2


def test_a_position_deeper_than_the_configured_drafts_is_counted_too():
    counted = metrics()
    counted.observe_steps(report(step((9,), (5,), source=DraftSource.PREDICTION)))
    name = "spec_decode_num_accepted_tokens_per_pos_total"
    assert Exposed(counted).value(name, position="4") == 1


def test_draft_lengths_are_a_histogram_with_zeros():
    counted = metrics()
    counted.observe_steps(report(step((0, 0, 3, 9))))
    exposed = Exposed(counted)
    assert exposed.histogram("chosen_draft_length") == (4, 12)
    below = {le: exposed.value("chosen_draft_length_bucket", le=le) for le in ("0.0", "3.0", "8.0")}
    assert below == {"0.0": 2, "3.0": 3, "8.0": 3}


def test_seconds_go_to_their_phase():
    counted = metrics()
    one = step((1,), draft_s=0.25, verify_s=1.0, sample_s=0.125, host_s=0.5)
    counted.observe_steps(report(one, one))
    exposed = Exposed(counted)
    seconds = [
        exposed.value("step_seconds_total", phase=phase)
        for phase in ("draft", "verify", "sample", "host")
    ]
    assert seconds == [0.5, 2.0, 0.25, 1.0]


def test_the_estimate_follows_the_steps():
    counted = metrics()
    name = "estimated_tokens_per_second_without_speculation"
    assert math.isnan(Exposed(counted).value(name))
    counted.observe_steps(report(step((0, 0), verify_s=0.5)))
    assert Exposed(counted).value(name) == pytest.approx(2 / 0.5)
    assert counted.plain_tokens_per_s == Exposed(counted).value(name)


def test_the_estimate_is_what_was_predicted_of_plain_decoding_or_else_leaves_drafting_out():
    drafted = step((2, 2), (2, 1), draft_s=0.5, verify_s=0.75, host_s=0.25)
    fixed, chosen, beside_prompt = metrics(), metrics(), metrics()
    fixed.observe_steps(report(drafted))
    assert fixed.plain_tokens_per_s == pytest.approx(2 / 1.0)
    decision = Decision(Reason.GAIN, (), 0.0, 0.5, 0.75, 0.25, 0.8, 5.0, 0.3)
    chosen.observe_steps(report(structs.replace(drafted, decision=decision)))
    assert chosen.plain_tokens_per_s == pytest.approx(2 / 0.8)
    beside_prompt.observe_steps(report(structs.replace(drafted, num_rows=50)))
    assert math.isnan(beside_prompt.plain_tokens_per_s)


def made_up_steps(seed: int) -> list[StepStats]:
    """Steps of all reasons, with and without prediction and price."""
    rng, steps = random.Random(seed), list[StepStats]()
    for _ in range(60):
        lengths = tuple(rng.choice((0, 1, 3, 7)) for _ in range(rng.randint(1, 4)))
        accepted = tuple(rng.randint(0, length) for length in lengths)
        times = {f"{phase}_s": rng.random() for phase in ("draft", "verify", "sample", "host")}
        source = rng.choice((DraftSource.SUFFIX, DraftSource.MODEL))
        made = step(lengths, accepted, source=source, **times)
        expected = [rng.random() for _ in range(6)]
        decision = Decision(
            rng.choice(list(Reason)),
            (),
            rng.choice((None, rng.random())),
            *rng.choice(((), expected)),
        )
        pairs = zip(lengths, accepted, strict=True)
        levels = tuple((source, length, kept) for length, kept in pairs if length)
        granted = tuple(length + rng.randint(0, 2) for length in lengths)
        steps.append(
            structs.replace(
                made,
                decision=rng.choice((None, decision)),
                granted_lengths=granted,
                draft_levels=levels,
            )
        )
    return steps


@pytest.mark.parametrize("seed", range(5))
def test_what_was_decided_is_the_sum_of_the_steps(seed: int):
    steps, counted = made_up_steps(seed), metrics()
    counted.observe_steps(report(*steps[:20]))
    counted.observe_steps(report(*steps[20:]))
    exposed = Exposed(counted)
    for reason in Reason:
        expected = sum(one.decision is not None and one.decision.reason == reason for one in steps)
        assert exposed.value("spec_decode_steps_total", reason=reason) == expected
    granted = [length for one in steps for length in one.granted_lengths]
    assert exposed.histogram("granted_draft_length") == (len(granted), sum(granted))
    known = [
        (one, one.decision)
        for one in steps
        if one.decision is not None and one.decision.is_predicted
    ]
    for name, part, expected_s in (
        ("predicted", "draft", sum(said.draft_s for _, said in known)),
        ("predicted", "target", sum(said.target_s for _, said in known)),
        ("predicted", "host", sum(said.host_s for _, said in known)),
        ("measured", "draft", sum(one.times.draft_s for one, _ in known)),
        ("measured", "target", sum(one.times.verify_s + one.times.sample_s for one, _ in known)),
        ("measured", "host", sum(one.host_s for one, _ in known)),
    ):
        seconds = exposed.value(f"{name}_step_seconds_total", part=part)
        assert seconds == pytest.approx(expected_s), (name, part)
    prices = [o.decision.price for o in steps if o.decision and o.decision.price is not None]
    assert exposed.value("spec_decode_price") == prices[-1]
    assert exposed.value("spec_decode_predicted_gain") == known[-1][1].gain
    newest = [one for one in steps if one.decision is not None][-1]
    assert exposed.value("spec_decode_is_drafting") == any(newest.granted_lengths)


@pytest.mark.parametrize("seed", range(5))
def test_the_acceptance_curve_counts_drafts_by_source_and_position(seed: int):
    steps, counted = made_up_steps(seed), metrics()
    counted.observe_steps(report(*steps))
    exposed = Exposed(counted)
    drafts = [draft for one in steps for draft in one.draft_levels]
    for source in (DraftSource.SUFFIX, DraftSource.MODEL):
        for position in range(7):
            where = {"source": str(source), "position": str(position)}
            reached = sum(who == source and levels > position for who, levels, _ in drafts)
            kept = sum(who == source and accepted > position for who, _, accepted in drafts)
            if not reached and position >= INFO.num_speculative_tokens:
                continue
            assert exposed.value("spec_decode_drafts_per_pos_total", **where) == reached
            assert exposed.value("spec_decode_accepted_drafts_per_pos_total", **where) == kept


def test_numbers_of_decisions_are_no_numbers_before_a_step():
    exposed = Exposed(metrics())
    for name in ("price", "predicted_gain", "is_drafting"):
        assert math.isnan(exposed.value(f"spec_decode_{name}"))


def test_an_alarm_counts_once_and_is_active_until_it_ends():
    counted = metrics()
    where = {"alarm": "acceptance_fell", "source": "suffix"}
    begins = Alarm(AlarmKind.ACCEPTANCE_FELL, "suffix", is_on=True, evidence="")
    for alarms, active, begun in (
        ((), 0, 0),
        ((begins,), 1, 1),
        ((), 1, 1),
        ((replace(begins, is_on=False),), 0, 1),
        ((begins,), 1, 2),
    ):
        counted.observe_steps(report(structs.replace(step((0,)), alarms=alarms)))
        exposed = Exposed(counted)
        assert exposed.value("spec_decode_alarm_active", **where) == active
        assert exposed.value("spec_decode_alarms_total", **where) == begun
