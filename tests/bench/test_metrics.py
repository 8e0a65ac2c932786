"""The numbers of a load test, by hand and against numpy."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outdraft.bench.metrics import (
    RequestSample,
    acceptance_report,
    counted_between,
    describe,
    detailed_report,
    load_report,
    most_at_once,
    parse_spec_counters,
)
from outdraft.engine.stats import StatsTotal

# Due at 1 s, sent at 1.5 s; text at 2, 2.25 and 3 s; over at 3 s; 5 tokens in 3 chunks.
SAMPLE = RequestSample(
    1.0, 1.5, [2.0, 2.25, 3.0], 3.0, prompt_tokens=7, completion_tokens=5, text="abc"
)
FAILED = RequestSample(0.0, 0.0, [0.5], 9.0, error="HTTP 429: full")


def test_a_sample_by_hand():
    assert SAMPLE.ttft_s == 1.0
    assert SAMPLE.e2el_s == 2.0
    assert SAMPLE.tpot_s == (2.0 - 1.0) / (5 - 1)
    assert SAMPLE.itls_s == [0.25, 0.75]


def test_one_token_has_no_time_per_output_token():
    assert RequestSample(0.0, 0.0, [1.0], 1.0, completion_tokens=1).tpot_s is None


def test_without_usage_chunks_are_counted():
    sample = RequestSample(0.0, 0.0, [1.0, 2.0, 4.0], 4.0)
    assert sample.num_output_tokens == 3
    assert sample.tpot_s == 1.5


def test_a_report_by_hand():
    late = RequestSample(2.0, 2.0, [5.0], 6.0, prompt_tokens=3, completion_tokens=1)
    report = load_report([SAMPLE, FAILED, late], 10.0, ("ttft", "tpot", "itl", "e2el"), (99, 50))
    assert report["completed"] == 2
    assert report["failed"] == 1
    assert report["failures"] == {"HTTP 429: full": 1}
    assert report["total_input_tokens"] == 10
    assert report["total_output_tokens"] == 6
    assert report["request_throughput"] == 0.2
    assert report["output_throughput"] == 0.6
    assert report["total_token_throughput"] == 1.6
    assert report["tokens_per_chunk"] == 6 / 4
    assert report["mean_ttft_ms"] == 2000.0
    assert report["mean_tpot_ms"] == report["p50_tpot_ms"] == 250.0
    assert report["mean_itl_ms"] == 500.0
    assert report["std_itl_ms"] == 250.0
    assert report["mean_e2el_ms"] == 3000.0
    assert report["p99_e2el_ms"] == pytest.approx(2000 + 0.99 * 2000)
    assert report["num_missing_usage"] == 0


def test_a_report_has_vllms_fields_and_no_latency_that_was_not_asked_for():
    report = load_report([SAMPLE], 10.0, ("ttft",), (99,))
    assert {
        "duration",
        "completed",
        "failed",
        "total_input_tokens",
        "total_output_tokens",
        "request_throughput",
        "output_throughput",
        "total_token_throughput",
        "max_concurrent_requests",
        "mean_ttft_ms",
        "median_ttft_ms",
        "std_ttft_ms",
        "p99_ttft_ms",
    } <= set(report)
    assert not any("tpot" in name or "e2el" in name for name in report)


def test_failures_alone_give_counts_and_no_latencies():
    report = load_report([FAILED, FAILED], 1.0, ("ttft", "client_queue_time"), (99,))
    assert report["failures"] == {"HTTP 429: full": 2}
    assert report["output_throughput"] == 0.0
    assert report["mean_ttft_ms"] is None
    assert report["p99_client_queue_time_ms"] is None
    assert report["tokens_per_chunk"] is None


def test_details_keep_the_failed_requests_in_their_places():
    details = detailed_report([SAMPLE, FAILED, RequestSample(4.0, error="not sent")])
    assert details["errors"] == [None, "HTTP 429: full", "not sent"]
    assert details["ttfts"] == [1.0, 0.5, None]
    assert details["latencies"] == [2.0, 9.0, None]
    assert details["itls"] == [[0.25, 0.75], [], []]
    assert details["due_times"] == [1.0, 0.0, 4.0]
    assert details["start_times"] == [1.5, 0.0, None]


TIMES = st.lists(st.floats(0, 1e4), min_size=1, max_size=40)


@given(TIMES, st.sets(st.integers(0, 100) | st.sampled_from([99.9, 0.5]), max_size=4))
def test_descriptions_are_numpys(values, percentiles):
    described = describe("e2el", values, sorted(percentiles))
    values_ms = np.array(values) * 1000
    assert described["mean_e2el_ms"] == pytest.approx(values_ms.mean())
    assert described["median_e2el_ms"] == pytest.approx(np.percentile(values_ms, 50))
    assert described["std_e2el_ms"] == pytest.approx(math.sqrt(values_ms.var()))
    for percentile in percentiles:
        wanted = np.percentile(values_ms, percentile)
        assert described[f"p{percentile}_e2el_ms"] == pytest.approx(wanted)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=20))
def test_most_at_once_is_the_most_that_share_an_instant(spans):
    samples = [RequestSample(0.0, start, ended_s=start + length) for start, length in spans]
    instants = [place / 2 + 0.25 for place in range(80)]
    running = [sum(s <= at < s + length for s, length in spans) for at in instants]
    assert most_at_once([*samples, RequestSample(0.0, error="not sent")]) == max(running)


@given(st.lists(st.floats(0.001, 10), min_size=2, max_size=30), st.integers(2, 100))
def test_time_per_token_and_to_the_first_add_up_to_the_whole(gaps, tokens):
    times = np.cumsum(gaps).tolist()
    sample = RequestSample(0.0, 0.0, times, times[-1], completion_tokens=tokens)
    assert sample.ttft_s + sample.tpot_s * (tokens - 1) == pytest.approx(sample.e2el_s)
    assert sample.ttft_s + sum(sample.itls_s) == pytest.approx(sample.e2el_s)


def counted(drafts, drafted, accepted, accepted_at=()):
    return StatsTotal(
        num_drafts=drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=accepted,
        accepted_at=Counter(dict(enumerate(accepted_at))),
    )


EXPOSITION = """# HELP outdraft:spec_decode_num_drafts_total Drafts.
# TYPE outdraft:spec_decode_num_drafts_total counter
PREFIX:spec_decode_num_drafts_total{engine="0",model_name="m"} 10.0
PREFIX:spec_decode_num_drafts_total{engine="1",model_name="m"} 30.0
PREFIX:spec_decode_num_drafts_created{engine="0"} 1.7e+09
PREFIX:spec_decode_num_draft_tokens_total{model_name="m"} 1.2e+02
PREFIX:spec_decode_num_accepted_tokens_total{model_name="m"} 60.0
PREFIX:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 40.0
PREFIX:spec_decode_num_accepted_tokens_per_pos_total{position="1",model_name="m"} 20.0
PREFIX:spec_decode_num_accepted_tokens_per_pos_created{position="1"} 1.7e+09
PREFIX:spec_decode_drafts_per_pos_total{position="0",source="suffix"} 44.0
PREFIX:spec_decode_accepted_drafts_per_pos_total{position="0",source="suffix"} 40.0
PREFIX:spec_decode_acceptance_length{model_name="m"} NaN
PREFIX:num_requests_running{model_name="m"} 3.0
"""


@pytest.mark.parametrize("prefix", ["outdraft", "vllm", "llamacpp"])
def test_counters_are_read_by_name_and_summed_over_engines(prefix):
    counters = parse_spec_counters(EXPOSITION.replace("PREFIX", prefix))
    assert counters == counted(40, 120, 60, (40, 20))


def test_counters_without_labels_and_suffix_are_read_too():
    counters = parse_spec_counters("vllm:spec_decode_num_drafts 3\n")
    assert counters == counted(3, 0, 0)


@pytest.mark.parametrize("text", ["", "other:spec_decode_num_drafts_total 3\n", "<html>"])
def test_a_server_without_speculation_has_no_counters(text):
    assert parse_spec_counters(text) is None


def test_acceptance_is_of_the_difference_with_vllms_formulas():
    before, after = counted(10, 30, 12, (8, 4)), counted(20, 70, 32, (16, 12, 4, 0))
    assert acceptance_report(counted_between(before, after)) == {
        "spec_decode_acceptance_rate": 50.0,
        "spec_decode_acceptance_length": 3.0,
        "spec_decode_num_drafts": 10,
        "spec_decode_draft_tokens": 40,
        "spec_decode_accepted_tokens": 20,
        "spec_decode_per_position_acceptance_rates": [0.8, 0.8, 0.4],
    }
