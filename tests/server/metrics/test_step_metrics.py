"""What steps add up to, worked out by hand."""

import math

import pytest

from outdraft.core.draft import DraftSource
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
