"""Latency, throughput and traces of a tiny engine."""

import json
import time
from collections import Counter

import pytest

from outdraft.bench.driver import queued
from outdraft.bench.in_process import (
    LatencyPlan,
    measure_latency,
    measure_throughput,
    num_tokens,
    run_batch,
    stats_report,
)
from outdraft.bench.workloads import BenchRequest
from outdraft.core.errors import ConfigError, RequestError
from outdraft.core.sampling import SamplingParams
from outdraft.engine.profiler import traced
from outdraft.engine.stats import StatsTotal
from tests.oracle.engines import engine

FAMILY = "qwen2"
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def requests(count, max_tokens=6):
    return [BenchRequest(tuple(range(2 + i, 9 + i)), max_tokens) for i in range(count)]


def soon(seconds=30.0):
    return time.monotonic() + seconds


def test_a_batch_is_what_the_engine_generates():
    llm, twin = engine(FAMILY, "ngram"), engine(FAMILY, "plain")
    done = run_batch(llm.engine, requests(5), GREEDY, soon())
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    wanted = twin.generate([list(one.prompt) for one in requests(5)], params, use_tqdm=False)
    by_id = {output.request_id: output for output in done.finished}
    assert [by_id[str(i)].outputs[0].token_ids for i in range(5)] == [
        output.outputs[0].token_ids for output in wanted
    ]
    assert num_tokens(done.finished) == 30
    assert done.num_left == 0


def test_more_requests_than_fit_the_queue_are_fed_as_there_is_room():
    llm = engine(FAMILY, "plain", max_waiting=2)
    assert len(run_batch(llm.engine, requests(9), GREEDY, soon()).finished) == 9


def test_a_deadline_leaves_an_empty_engine_and_counts_what_it_cut():
    llm = engine(FAMILY, "plain")
    done = run_batch(llm.engine, requests(6), GREEDY, soon(-1.0))
    assert (len(done.finished), done.num_left) == (0, 6)
    assert not llm.engine.has_work
    llm.engine.check_invariants()
    result = measure_throughput(llm.engine, requests(1)[0], requests(6), GREEDY, soon(-1.0))
    assert result["failed"] == 6
    assert result["requests_per_second"] == 0.0
    assert "before 6 of the requests" in result["notes"][0]


def test_a_request_that_can_never_run_is_refused():
    llm = engine(FAMILY, "plain")
    with pytest.raises(RequestError, match="prompt"):
        run_batch(llm.engine, [BenchRequest((), 3)], GREEDY, soon())


def test_a_request_whose_output_would_be_cut_is_refused():
    llm = engine(FAMILY, "plain")
    most = llm.engine.inputs.max_model_len
    run_batch(llm.engine, requests(1, most - 7), GREEDY, soon(-1.0))
    with pytest.raises(RequestError, match="exceed max_model_len"):
        run_batch(llm.engine, requests(1, most - 6), GREEDY, soon())


def test_throughput_counts_every_token_once_with_vllms_names():
    llm = engine(FAMILY, "perfect")
    seen = []
    result = measure_throughput(
        llm.engine, requests(9)[8], requests(8), GREEDY, soon(), seen.append
    )
    assert len(seen) == result["num_requests"] == 8
    assert result["failed"] == 0
    assert result["total_input_tokens"] == 8 * 7
    assert result["total_output_tokens"] == 48
    assert result["total_num_tokens"] == 48 + 8 * 7
    assert result["tokens_per_second"] == pytest.approx(104 / result["elapsed_time"])
    assert result["output_throughput"] == pytest.approx(48 / result["elapsed_time"])
    assert result["requests_per_second"] == pytest.approx(8 / result["elapsed_time"])
    # Without the warm-up's: of six tokens the first comes with the prompt, then 4 and 1 more.
    assert result["spec_decode_acceptance_rate"] == 100.0
    assert result["notes"] == []
    assert llm.engine.on_step is None


def test_latency_has_one_time_per_iteration_and_vllms_names():
    llm = engine(FAMILY, "perfect")
    plan = LatencyPlan(batch_size=2, num_iters_warmup=1, num_iters=3)
    seen = []
    result = measure_latency(llm.engine, requests(8), plan, GREEDY, soon(), seen.append)
    assert result["latencies"] == seen
    assert len(seen) == 3
    assert result["avg_latency"] == pytest.approx(sum(seen) / 3)
    assert result["percentiles"]["50"] == sorted(seen)[1]
    assert set(result["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert result["output_throughput"] == pytest.approx(3 * 2 * 6 / sum(seen))
    assert result["num_distinct_prompts"] == 8
    assert result["spec_decode_acceptance_rate"] == 100.0
    phases = result["phase_seconds"]
    assert set(phases) == {"draft", "verify", "sample", "host"}
    assert 0 < sum(phases.values()) <= sum(seen)
    assert llm.engine.on_step is None


def test_latency_without_one_whole_iteration_is_refused():
    llm = engine(FAMILY, "plain")
    plan = LatencyPlan(batch_size=1, num_iters_warmup=0, num_iters=2)
    with pytest.raises(ConfigError, match="--max-seconds"):
        measure_latency(llm.engine, requests(2), plan, GREEDY, soon(-1))
    assert llm.engine.on_step is None


def test_repeated_prompts_are_admitted():
    llm = engine(FAMILY, "plain")
    result = measure_throughput(llm.engine, requests(1)[0], requests(2) * 2, GREEDY, soon())
    assert "only 2 of 4 prompts differ" in result["notes"][0]


def test_plain_decoding_has_no_acceptance():
    assert "spec_decode_acceptance_rate" not in stats_report(StatsTotal())


def test_a_prediction_reaches_the_engine():
    request = BenchRequest("def", 4, "ine")
    [(_, prompt, params, _)] = queued([request], GREEDY)
    assert (prompt, params.max_tokens, params.prediction) == ("def", 4, "ine")
    assert params.ignore_eos


def test_a_trace_has_a_range_around_every_phase_of_every_step(tmp_path):
    llm = engine(FAMILY, "combined")
    path = tmp_path / "traces" / "one.json"
    with traced(llm.engine, path):
        run = run_batch(llm.engine, requests(2), GREEDY, soon())
    events = json.loads(path.read_text())["traceEvents"]
    names = {"step", "schedule", "draft", "verify", "sample", "commit"}
    spans = [e for e in events if e.get("cat") == "user_annotation" and e["name"] in names]
    counts = Counter(span["name"] for span in spans)
    assert set(counts) == names
    for name in ("step", "schedule", "verify", "commit"):
        assert counts[name] == run.stats.num_steps > 0, name
    whole = sorted((s["ts"], s["ts"] + s["dur"]) for s in spans if s["name"] == "step")
    for span in spans:
        assert any(a <= span["ts"] and span["ts"] + span["dur"] <= b for a, b in whole)


def test_a_trace_leaves_the_engine_as_it_was(tmp_path):
    llm = engine(FAMILY, "combined")
    runner = llm.engine.runner
    owners = (llm.engine, llm.engine.scheduler, llm.engine.drafting, runner)
    before = [dict(vars(owner)) for owner in owners]
    with traced(llm.engine, tmp_path / "one.json"):
        assert "step" in vars(llm.engine)
    assert [set(vars(owner)) for owner in owners] == [set(names) for names in before]
