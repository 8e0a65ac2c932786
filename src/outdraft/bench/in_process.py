"""Requests run by an engine in this process: latency of batches, and throughput of many prompts."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from outdraft.bench.driver import PHASES, EngineRun, queued
from outdraft.bench.metrics import acceptance_report, per_second
from outdraft.bench.workloads import BenchRequest, num_distinct_prompts, repetition_notes
from outdraft.config.benchmarks import LatencyPlan
from outdraft.core.errors import ConfigError, RequestError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import Queued
from outdraft.engine.engine import Engine
from outdraft.engine.stats import StatsTotal

PERCENTAGES = (10, 25, 50, 75, 90, 99)  # as in vLLM


def run_batch(
    engine: Engine,
    requests: Sequence[BenchRequest],
    params: SamplingParams,
    deadline_s: float,
    on_done: Callable[[RequestOutput], object] = lambda output: None,
    stats: StatsTotal | None = None,
) -> EngineRun:
    """Queue everything, as fast as there is room, and step until nothing is left to do.

    Args:
        params: of every request, but for its length and its prediction.
        deadline_s: of time.monotonic; what runs then is aborted.
        stats: to which the steps are added.

    Raises:
        RequestError: a request could never run; found before the time is taken.
        GenerationError: one failed while it ran.
    """
    queue: list[Queued] = []
    most = engine.inputs.max_model_len
    for request_id, given, own, priority in queued(requests, params):
        prompt = engine.check_request(given, own)
        used, wanted = len(prompt.token_ids), own.max_tokens or 0
        if used + wanted > most:
            raise RequestError(
                f"a prompt of {used:,} tokens and an output of {wanted:,} exceed "
                f"max_model_len, which is {most:,}: lower output_len",
                "max_tokens",
            )
        queue.append((request_id, prompt, own, priority))

    def note(output: RequestOutput) -> None:
        if output.finished:
            on_done(output)

    with closing(EngineRun(engine, queue, note, stats=stats)) as run:
        run.advance(deadline_s - time.monotonic())
    return run


def num_tokens(outputs: Iterable[RequestOutput]) -> int:
    """Tokens that were generated, of one output a request."""
    return sum(len(output.outputs[0].token_ids) for output in outputs)


def stats_report(total: StatsTotal) -> dict[str, Any]:
    """Acceptance, with the names of a load test, and where the time of the steps went."""
    result: dict[str, Any] = {
        "num_steps": total.num_steps,
        "phase_seconds": {phase: getattr(total, f"{phase}_s") for phase in PHASES},
    }
    if not total.num_drafts:
        return result
    by_source = {
        str(source): {"drafted": drafted, "accepted": total.accepted_by_source[source]}
        for source, drafted in total.drafted_by_source.items()
    }
    return result | acceptance_report(total) | {"spec_decode_tokens_by_source": by_source}


def measure_latency(
    engine: Engine,
    requests: Sequence[BenchRequest],
    plan: LatencyPlan,
    params: SamplingParams,
    deadline_s: float,
    on_iteration: Callable[[float], object] = lambda latency_s: None,
) -> dict[str, Any]:
    """Time batches, each from its first prompt token to the last token of its last request.

    The result has vLLM's fields; seconds.

    Iterations that the deadline cuts are left out and counted in `num_cut_iters`.

    Raises:
        ConfigError: not one iteration was over by the deadline.
    """
    assert len(requests) == plan.num_requests
    size = plan.batch_size
    batches = [requests[start : start + size] for start in range(0, len(requests), size)]
    for batch in batches[: plan.num_iters_warmup]:
        run_batch(engine, batch, params, deadline_s)
    total, latencies, num_output_tokens = StatsTotal(), list[float](), 0
    for batch in batches[plan.num_iters_warmup :]:
        done = run_batch(engine, batch, params, deadline_s, stats=total)
        if done.num_left:
            break
        latencies.append(done.elapsed_s)
        num_output_tokens += num_tokens(done.finished)
        on_iteration(done.elapsed_s)
    if not latencies:
        raise ConfigError("no iteration was over within --max-seconds")
    distinct, num_cut = num_distinct_prompts(requests), plan.num_iters - len(latencies)
    percentiles = np.percentile(latencies, PERCENTAGES).tolist()
    notes = ["every iteration has prompts of its own, so the spread is that of the prompts too"]
    notes += repetition_notes(distinct, len(requests))
    if num_cut:
        notes.append(f"the time was over before {num_cut} of the iterations")
    return {
        "avg_latency": float(np.mean(latencies)),
        "std_latency": float(np.std(latencies)),
        "latencies": latencies,
        "percentiles": dict(zip(map(str, PERCENTAGES), percentiles, strict=True)),
        "batch_size": plan.batch_size,
        "num_iters_warmup": plan.num_iters_warmup,
        "num_iters": len(latencies),
        "num_cut_iters": num_cut,
        "num_distinct_prompts": distinct,
        "output_throughput": num_output_tokens / sum(latencies),
        **stats_report(total),
        "notes": notes,
    }


def measure_throughput(
    engine: Engine,
    warm_up: BenchRequest,
    requests: Sequence[BenchRequest],
    params: SamplingParams,
    deadline_s: float,
    on_done: Callable[[RequestOutput], object] = lambda output: None,
) -> dict[str, Any]:
    """Complete many prompts that are all there at once; the result has vLLM's fields.

    The warm-up is run first and not measured: threads and memory come with it.

    Requests that the deadline ends are counted as failed; neither they nor their tokens are in the
    other counts, so a run that was cut looks slower than it was, never faster.
    """
    run_batch(engine, [warm_up], params, deadline_s)
    done = run_batch(engine, requests, params, deadline_s, on_done)
    num_input = sum(len(output.prompt_token_ids) for output in done.finished)
    num_output = num_tokens(done.finished)
    distinct = num_distinct_prompts(requests)
    notes = repetition_notes(distinct, len(requests))
    if done.num_left:
        notes.append(f"the time was over before {done.num_left} of the requests were done")
    return {
        "elapsed_time": done.elapsed_s,
        "num_requests": len(done.finished),
        "failed": done.num_left,
        "num_distinct_prompts": distinct,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "total_num_tokens": num_input + num_output,
        "requests_per_second": per_second(len(done.finished), done.elapsed_s),
        "tokens_per_second": per_second(num_input + num_output, done.elapsed_s),
        "output_throughput": per_second(num_output, done.elapsed_s),
        **stats_report(done.stats),
        "notes": notes,
    }
