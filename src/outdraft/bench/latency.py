"""How long one batch takes, from the first prompt token to the last token of its last request.

Every iteration has prompts of its own: the memory of earlier answers would draft the same ones
again, and a user's next batch is another one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from outdraft.bench.in_process import Generation, run_batch, stats_report
from outdraft.bench.workloads import BenchRequest, num_distinct_prompts
from outdraft.core.errors import ConfigError
from outdraft.engine.engine import Engine
from outdraft.engine.stats import StatsTotal

PERCENTAGES = (10, 25, 50, 75, 90, 99)  # as in vLLM


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyPlan:
    """How often a batch is run; names as in vLLM."""

    batch_size: int = 1
    num_iters_warmup: int = 2
    num_iters: int = 10

    def __post_init__(self) -> None:
        if self.batch_size < 1 or self.num_iters < 1 or self.num_iters_warmup < 0:
            raise ConfigError("batch_size and num_iters must be at least 1, num_iters_warmup 0")

    @property
    def num_requests(self) -> int:
        return self.batch_size * (self.num_iters_warmup + self.num_iters)


def measure_latency(
    engine: Engine,
    requests: Sequence[BenchRequest],
    plan: LatencyPlan,
    generation: Generation,
    deadline_s: float,
    on_iteration: Callable[[float], object] = lambda latency_s: None,
) -> dict[str, Any]:
    """The result, with vLLM's fields; seconds.

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
    if num_distinct < num_prompts:
        notes.append(
            f"only {num_distinct} of {num_prompts} prompts differ: drafts from earlier answers "
            "make repeated ones faster"
        )
    if num_cut:
        notes.append(f"the time was over before {num_cut} of the iterations")
    return notes
