"""The load test's client and loops against a scripted server."""

import asyncio
import math
import socket
import time

import numpy as np
import pytest

from outdraft.bench.metrics import RequestSample
from outdraft.bench.serve import (
    Clients,
    Endpoint,
    LoadRun,
    TrafficPlan,
    check_reporting,
    run_load,
    serve_report,
    with_model,
)
from outdraft.bench.workloads import BenchRequest, arrival_times
from outdraft.core.errors import ConfigError
from tests.bench.scripted_server import DONE, Script, completion, serving

PROMPTS = [BenchRequest(f"prompt {i}", 16) for i in range(12)]


def endpoint(seen, path="/v1/completions", **options):
    return Endpoint(base_url=seen.url, endpoint=path, model="scripted", **options)


def load(where, requests, traffic=None, seconds=60.0):
    traffic = traffic or TrafficPlan()
    deadline_s = time.monotonic() + seconds
    return asyncio.run(run_load(where, requests, traffic, deadline_s, lambda sample: None))


def one(script, path="/v1/completions", seconds=60.0):
    """The sample of one request that is answered so."""
    with serving(lambda number, body: script) as seen:
        return load(endpoint(seen, path), PROMPTS[:1], seconds=seconds).samples[0]


def test_an_answers_text_tokens_and_times_are_booked():
    sample = one(completion(["a", "bc", "d"], gap_s=0.05, first_s=0.1, usage=(5, 6)))
    assert sample.error is None
    assert sample.text == "abcd"
    assert sample.finish_reason == "length"
    assert (sample.prompt_tokens, sample.completion_tokens) == (5, 6)
    assert len(sample.chunk_times_s) == 3
    assert 0.1 <= sample.ttft_s < sample.e2el_s
    assert min(sample.itls_s) > 0.03
    assert sample.e2el_s >= 0.2
    assert sample.tpot_s == pytest.approx((sample.e2el_s - sample.ttft_s) / 5)


def test_a_chats_role_is_not_its_first_text():
    sample = one(completion(["a", "b"], first_s=0.1, chat=True), "/v1/chat/completions")
    assert sample.error is None
    assert sample.text == "ab"
    assert sample.ttft_s >= 0.1


def test_without_usage_tokens_are_unknown():
    sample = one(completion(["a", "b"], usage=None))
    assert sample.error is None
    assert sample.completion_tokens is None
    assert sample.num_output_tokens == 2


@pytest.mark.parametrize(
    ("script", "error"),
    [
        (
            Script(status=429, body='{"error": {"message": "the queue\\nis full"}}'),
            "HTTP 429: the queue is full",
        ),
        (Script(status=500, body="<h1>oh"), "HTTP 500: <h1>oh"),
        (
            Script([(0, {"choices": [{"text": "a"}]}), (0, {"error": {"message": "died"}})]),
            "error in the stream: died",
        ),
        (Script([(0, {"choices": [{"text": "a"}]})]), "the stream ended early"),
        (Script([(0, {"choices": [{"text": "a"}]})], breaks=True), "RemoteProtocolError"),
        (Script([(0, "{not json")]), "no JSON object"),
        (Script([(0, "[1]")]), "no JSON object"),
    ],
)
def test_what_goes_wrong_is_the_samples_error(script, error):
    sample = one(script)
    assert error in sample.error
    assert sample.ended_s is not None


def test_a_finish_reason_ends_a_stream_without_done():
    events = [(0, {"choices": [{"text": "a", "finish_reason": "stop"}]})]
    assert one(Script(events)).error is None
    assert one(Script([*events, (0, DONE)])).error is None


def test_a_refused_connection_is_a_failure_of_each_request():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        where = Endpoint(port=unused.getsockname()[1], model="m")
        samples = load(where, PROMPTS[:3]).samples
    assert all("ConnectError" in sample.error for sample in samples)


def test_what_is_not_answered_in_time_has_failed_and_is_kept():
    def answer(number, body):
        return completion(["a", "b"], gap_s=0.0 if body["prompt"] == "prompt 0" else 30.0)

    with serving(answer) as seen:
        traffic = TrafficPlan(max_concurrency=2)
        run = load(endpoint(seen), PROMPTS[:4], traffic, seconds=0.5)
    errors = [sample.error for sample in run.samples]
    assert errors[0] is None
    assert sorted(errors[1:]) == [
        "not sent when the time was over",
        "unanswered when the time was over",
        "unanswered when the time was over",
    ]
    assert run.duration_s < 5


def test_requests_carry_what_was_asked_for():
    with serving(lambda number, body: completion(["a"])) as seen:
        where = endpoint(seen, header=["X-Key=k"], extra_body='{"temperature": 0.5}')
        load(where, [BenchRequest((4, 5), 9)])
        load(where, [BenchRequest("p", 9, "expected")])
    assert seen.bodies == [
        {
            "model": "scripted",
            "max_tokens": 9,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "prompt": prompt,
            **more,
        }
        for prompt, more in (
            ([4, 5], {}),
            ("p", {"prediction": {"type": "content", "content": "expected"}}),
        )
    ]
    assert seen.headers[0]["x-key"] == "k"


def test_token_ids_are_refused_by_chat_before_anything_is_sent():
    with serving(lambda number, body: completion(["a"])) as seen:
        with pytest.raises(ConfigError, match="token ids"):
            load(endpoint(seen, "/v1/chat/completions"), [PROMPTS[0], BenchRequest((1,), 2)])
        assert seen.bodies == []


def test_the_model_is_the_servers_first_one_unless_it_is_named():
    with serving(lambda number, body: completion(["a"])) as seen:
        asked = asyncio.run(with_model(Endpoint(base_url=seen.url)))
        named = asyncio.run(with_model(Endpoint(base_url=seen.url, model="mine")))
        url = seen.url
    assert (asked.model, named.model) == ("scripted", "mine")
    with pytest.raises(ConfigError, match="is the server up"):
        asyncio.run(with_model(Endpoint(base_url=url)))


@pytest.mark.parametrize("limit", [1, 3])
def test_no_more_requests_than_the_concurrency_are_under_way(limit):
    with serving(lambda number, body: completion(["a"], first_s=0.02)) as seen:
        run = load(endpoint(seen), PROMPTS, TrafficPlan(max_concurrency=limit))
    assert seen.most_running == limit
    assert len(seen.bodies) == len(PROMPTS)
    assert all(sample.error is None for sample in run.samples)


def test_requests_under_way_have_clients_of_their_own_which_are_used_again():
    clients = Clients(Endpoint(port=1))
    with clients.lend() as first, clients.lend() as second:
        assert first is not second
    with clients.lend() as third, clients.lend() as fourth:
        assert {third, fourth} == {first, second}
    asyncio.run(clients.aclose())
    assert first.is_closed
    assert second.is_closed


def test_in_a_closed_loop_latency_counts_from_the_sending():
    with serving(lambda number, body: completion(["a"], first_s=0.1)) as seen:
        run = load(endpoint(seen), PROMPTS[:4], TrafficPlan(max_concurrency=1))
    assert run.duration_s >= 0.4
    # One after the other: had they counted from the start, they would add up to more.
    assert sum(sample.e2el_s for sample in run.samples) <= run.duration_s


@pytest.mark.slow
def test_in_an_open_loop_latency_counts_from_the_scheduled_arrival():
    """A server that answers one at a time: the last request waits for all others, wherever."""
    for limit in (None, 1):
        with serving(
            lambda number, body: completion(["a"], first_s=0.1), one_at_a_time=True
        ) as seen:
            traffic = TrafficPlan(request_rate=50.0, max_concurrency=limit)
            run = load(endpoint(seen), PROMPTS[:6], traffic)
        due = [sample.due_s for sample in run.samples]
        assert due == arrival_times(6, TrafficPlan(request_rate=50.0))
        assert max(sample.e2el_s for sample in run.samples) >= 0.6 - due[-1]
        ends = [sample.due_s + sample.e2el_s for sample in run.samples]
        overlaps = any(
            later.sent_s < end for later, end in zip(run.samples[1:], ends[:-1], strict=True)
        )
        assert overlaps == (limit is None)


def test_requests_are_sent_when_they_are_due():
    with serving(lambda number, body: completion(["a"])) as seen:
        run = load(endpoint(seen), PROMPTS, TrafficPlan(request_rate=40.0, seed=5))
    late_s = [sample.sent_s - sample.due_s for sample in run.samples]
    assert min(late_s) >= 0
    assert np.median(late_s) < 0.1  # the machine may stall, but not half the time
    assert len(seen.received_s) == len(PROMPTS)


def counters(drafts, drafted, first, second):
    return (
        f"outdraft:spec_decode_num_drafts_total {drafts}\n"
        f"outdraft:spec_decode_num_draft_tokens_total {drafted}\n"
        f"outdraft:spec_decode_num_accepted_tokens_total {first + second}\n"
        f'outdraft:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {first}\n'
        f'outdraft:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {second}\n'
    )


def test_acceptance_is_what_the_servers_counters_rose_by_behind_the_warm_ups():
    shown = {0: counters(1, 2, 0, 0), 1: counters(10, 20, 4, 2), 4: counters(20, 40, 12, 8)}

    def answer(number, body):
        seen.metrics = shown.get(number, seen.metrics)
        return completion(["a"])

    traffic = TrafficPlan(num_warmups=2, max_concurrency=1)
    with serving(answer) as seen:
        seen.metrics = shown[0]
        run = load(endpoint(seen), PROMPTS[:5], traffic)
    report = serve_report(run, PROMPTS[:5], traffic)
    assert report["spec_decode_num_drafts"] == 10
    assert report["spec_decode_acceptance_rate"] == 70.0
    assert report["spec_decode_acceptance_length"] == 2.4
    assert report["spec_decode_per_position_acceptance_rates"] == [0.8, 0.6]


@pytest.mark.parametrize(("gap_s", "num_bunched"), [(0.00003, 6), (0.012, 0)])
def test_chunks_that_were_held_up_together_are_counted_and_warned_of(gap_s, num_bunched):
    times = [0.2 + i * gap_s for i in range(4)]
    samples = [RequestSample(0.0, 0.0, times, times[-1], 5, 4) for _ in range(2)]
    report = serve_report(LoadRun(samples, 1.0, None, 0), PROMPTS[:2], TrafficPlan())
    assert report["num_bunched_chunks"] == num_bunched
    assert ("TCP_NODELAY" in "".join(report["notes"])) == bool(num_bunched)


def test_a_server_without_counters_has_no_acceptance():
    with serving(lambda number, body: completion(["a"])) as seen:
        run = load(endpoint(seen), PROMPTS[:1])
    report = serve_report(run, PROMPTS[:1], TrafficPlan())
    assert not any("spec_decode" in name for name in report)


def test_reports_say_how_latency_was_counted_and_what_failed():
    def answer(number, body):
        return Script(status=429, body="full") if number == 0 else completion(["a", "b"])

    with serving(answer) as seen:
        traffic = TrafficPlan(max_concurrency=1, num_warmups=1)
        requests = [PROMPTS[0], *PROMPTS[1:4], PROMPTS[1]]
        closed = serve_report(load(endpoint(seen), requests, traffic), requests, traffic)
        traffic = TrafficPlan(request_rate=100.0)
        opened = serve_report(load(endpoint(seen), PROMPTS[:2], traffic), PROMPTS[:2], traffic)
    assert closed["completed"] == 4
    assert closed["num_distinct_prompts"] == 3
    notes = "\n".join(closed["notes"])
    for part in ("closed loop", "1.50 tokens", "only 3 of 4 prompts differ", "1 of the warm-up"):
        assert part in notes
    assert opened["notes"][0].startswith("open loop: latencies count from the scheduled arrival")
    assert opened["request_rate"] == 100.0
    assert closed["request_rate"] == "inf"


@pytest.mark.parametrize(
    "options",
    [{"max_concurrency": 0}, {"num_warmups": -1}, {"request_rate": 0.0}, {"burstiness": math.nan}],
)
def test_impossible_traffic_is_refused(options):
    with pytest.raises(ConfigError):
        TrafficPlan(**options)


@pytest.mark.parametrize(("metrics", "percentiles"), [(["ttfb"], [99.0]), (["ttft"], [101.0])])
def test_impossible_reports_are_refused(metrics, percentiles):
    with pytest.raises(ConfigError):
        check_reporting(metrics, percentiles)
