"""Requests run by an engine in this process: latency of batches, and throughput of many prompts."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from outdraft.bench.metrics import SpecCounters, acceptance_report, per_second
from outdraft.bench.workloads import BenchRequest, num_distinct_prompts, repetition_notes
from outdraft.config.benchmarks import LatencyPlan
from outdraft.core.errors import ConfigError, RequestError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import Assembler, Queued, checked
from outdraft.engine.engine import Engine
from outdraft.engine.stats import StatsTotal

PERCENTAGES = (10, 25, 50, 75, 90, 99)  # as in vLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How every request of a benchmark is sampled."""

    temperature: float = 0.0
    ignore_eos: bool = False
    detokenize: bool = True

    def params(self, request: BenchRequest) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            detokenize=self.detokenize,
            max_tokens=request.max_tokens,
            prediction=request.prediction,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """What became of some requests that were queued at once."""

    outputs: list[RequestOutput]  # of those that finished, in the order they did
    num_unfinished: int  # requests that the deadline ended
    elapsed_s: float

    @property
    def num_input_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)


def run_batch(
    engine: Engine,
    requests: Sequence[BenchRequest],
    generation: Generation,
    deadline_s: float,
    on_done: Callable[[RequestOutput], object] = lambda output: None,
) -> Batch:
    """Queue everything, as fast as there is room, and step until nothing is left to do.

    Args:
        deadline_s: of time.monotonic; what runs then is aborted.

    Raises:
        RequestError: a request could never run; found before the time is taken.
        GenerationError: one failed while it ran.
    """
    queue: list[Queued] = []
    for number, request in enumerate(requests):
        params = generation.params(request)
        prompt = engine.check_request(request.prompt, params)
        most, used = engine.inputs.max_model_len, len(prompt.token_ids)
        if used + request.max_tokens > most:
            raise RequestError(
                f"a prompt of {used:,} tokens and an output of {request.max_tokens:,} exceed "
                f"max_model_len, which is {most:,}: lower output_len",
                "max_tokens",
            )
        queue.append((str(number), prompt, params, 0))
    outputs: list[RequestOutput] = []
    started_s = time.perf_counter()
    with closing(Assembler(engine).run(queue)) as steps:
        while time.monotonic() < deadline_s and (grown := next(steps, None)) is not None:
            for output in grown:
                if output.finished or output.error is not None:
                    outputs.append(checked(output))
                    on_done(output)
        elapsed_s = time.perf_counter() - started_s
    return Batch(outputs, len(requests) - len(outputs), elapsed_s)


def stats_report(total: StatsTotal) -> dict[str, Any]:
    """Acceptance, with the names of a load test, and where the time of the steps went."""
    result: dict[str, Any] = {
        "num_steps": total.num_steps,
        "phase_seconds": {
            "draft": total.draft_s,
            "verify": total.verify_s,
            "sample": total.sample_s,
            "host": total.host_s,
        },
    }
    if not total.num_drafts:
        return result
    counters = SpecCounters(
        total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens, total.accepted_at
    )
    by_source = {
        str(source): {"drafted": drafted, "accepted": total.accepted_by_source[source]}
        for source, drafted in total.drafted_by_source.items()
    }
    return result | acceptance_report(counters) | {"spec_decode_tokens_by_source": by_source}


def measure_latency(
    engine: Engine,
    requests: Sequence[BenchRequest],
    plan: LatencyPlan,
    generation: Generation,
    deadline_s: float,
    on_iteration: Callable[[float], object] = lambda latency_s: None,
) -> dict[str, Any]:
    """How long one batch takes, from its first prompt token to the last token of its last request.

    The result has vLLM's fields; seconds.

    Iterations that the deadline cuts are left out and counted in `num_cut_iters`.

    Raises:
        ConfigError: not one iteration was over by the deadline.
    """
    assert len(requests) == plan.num_requests
    batches = [
        requests[start : start + plan.batch_size]
        for start in range(0, len(requests), plan.batch_size)
    ]
    for batch in batches[: plan.num_iters_warmup]:
        run_batch(engine, batch, generation, deadline_s)
    total = StatsTotal()
    latencies: list[float] = []
    num_output_tokens = 0
    engine.on_step = total.add
    try:
        for batch in batches[plan.num_iters_warmup :]:
            done = run_batch(engine, batch, generation, deadline_s)
            if done.num_unfinished:
                break
            latencies.append(done.elapsed_s)
            num_output_tokens += done.num_output_tokens
            on_iteration(done.elapsed_s)
    finally:
        engine.on_step = None
    if not latencies:
        raise ConfigError("no iteration was over within --max-seconds")
    distinct = num_distinct_prompts(requests)
    return {
        **_describe(latencies),
        "batch_size": plan.batch_size,
        "num_iters_warmup": plan.num_iters_warmup,
        "num_iters": len(latencies),
        "num_cut_iters": plan.num_iters - len(latencies),
        "num_distinct_prompts": distinct,
        "output_throughput": num_output_tokens / sum(latencies),
        **stats_report(total),
        "notes": _notes(distinct, len(requests), plan.num_iters - len(latencies)),
    }


def _describe(latencies: Sequence[float]) -> dict[str, Any]:
    percentiles = np.percentile(latencies, PERCENTAGES).tolist()
    return {
        "avg_latency": float(np.mean(latencies)),
        "std_latency": float(np.std(latencies)),
        "latencies": list(latencies),
        "percentiles": dict(zip(map(str, PERCENTAGES), percentiles, strict=True)),
    }


def _notes(num_distinct: int, num_prompts: int, num_cut: int) -> list[str]:
    notes = ["every iteration has prompts of its own, so the spread is that of the prompts too"]
    notes += repetition_notes(num_distinct, num_prompts)
    if num_cut:
        notes.append(f"the time was over before {num_cut} of the iterations")
    return notes


def measure_throughput(
    engine: Engine,
    warm_up: BenchRequest,
    requests: Sequence[BenchRequest],
    generation: Generation,
    deadline_s: float,
    on_done: Callable[[RequestOutput], object] = lambda output: None,
) -> dict[str, Any]:
    """How fast many prompts that are all there at once are completed; vLLM's fields.

    The warm-up is run first and not measured: threads and memory come with it.

    Requests that the deadline ends are counted as failed; neither they nor their tokens are in the
    other counts, so a run that was cut looks slower than it was, never faster.
    """
    run_batch(engine, [warm_up], generation, deadline_s)
    total = StatsTotal()
    engine.on_step = total.add
    try:
        done = run_batch(engine, requests, generation, deadline_s, on_done)
    finally:
        engine.on_step = None
    num_tokens = done.num_input_tokens + done.num_output_tokens
    distinct = num_distinct_prompts(requests)
    notes = repetition_notes(distinct, len(requests))
    if done.num_unfinished:
        notes.append(f"the time was over before {done.num_unfinished} of the requests were done")
    return {
        "elapsed_time": done.elapsed_s,
        "num_requests": len(done.outputs),
        "failed": done.num_unfinished,
        "num_distinct_prompts": distinct,
        "total_input_tokens": done.num_input_tokens,
        "total_output_tokens": done.num_output_tokens,
        "total_num_tokens": num_tokens,
        "requests_per_second": per_second(len(done.outputs), done.elapsed_s),
        "tokens_per_second": per_second(num_tokens, done.elapsed_s),
        "output_throughput": per_second(done.num_output_tokens, done.elapsed_s),
        **stats_report(total),
        "notes": notes,
    }
