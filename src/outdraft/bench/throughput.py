"""How fast many prompts that are all there at once are completed."""

from collections.abc import Callable, Sequence
from typing import Any

from outdraft.bench.in_process import Generation, run_batch, stats_report
from outdraft.bench.metrics import per_second
from outdraft.bench.workloads import BenchRequest, num_distinct_prompts
from outdraft.core.outputs import RequestOutput
from outdraft.engine.engine import Engine
from outdraft.engine.stats import StatsTotal


def measure_throughput(
    engine: Engine,
    warm_up: BenchRequest,
    requests: Sequence[BenchRequest],
    generation: Generation,
    deadline_s: float,
    on_done: Callable[[RequestOutput], object] = lambda output: None,
) -> dict[str, Any]:
    """The result, with vLLM's fields.

    The warm-up is run first and not measured: kernels compile at their first call.

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
    notes: list[str] = []
    if done.num_unfinished:
        notes.append(f"the time was over before {done.num_unfinished} of the requests were done")
    if distinct < len(requests):
        notes.append(
            f"only {distinct} of {len(requests)} prompts differ: caches of prompts, and drafts "
            "from earlier answers, make repeated ones faster"
        )
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
