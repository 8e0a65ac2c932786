"""A load test of any OpenAI-compatible server.

At a rate (open loop) requests are due at random times, whatever the server does; latencies count
from then. At a concurrency alone (closed loop) a request is due when an earlier one makes room, so
a slow server is asked less: such latencies say nothing about waiting.
"""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from outdraft.bench.client import (
    Clients,
    Endpoint,
    first_model,
    open_client,
    send,
    spec_counters,
)
from outdraft.bench.metrics import (
    METRICS,
    RequestSample,
    SpecCounters,
    acceptance_report,
    detailed_report,
    load_report,
)
from outdraft.bench.workloads import (
    BenchRequest,
    arrival_times,
    num_distinct_prompts,
    repetition_notes,
)
from outdraft.config.benchmarks import TrafficPlan
from outdraft.core.errors import ConfigError

MAX_BUNCHED_SHARE = 0.1  # of the chunks, without a word about it

OnDone = Callable[[RequestSample], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reporting:
    """Metrics and percentiles to report; names as in vLLM."""

    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    percentiles: tuple[float, ...] = (99.0,)
    is_detailed: bool = False  # every request's own times and text too

    def __post_init__(self) -> None:
        for name in self.metrics:
            if name not in METRICS:
                raise ConfigError(f"no metric {name!r}: choose from {', '.join(METRICS)}")
        for percentile in self.percentiles:
            if not 0 <= percentile <= 100:
                raise ConfigError(f"percentiles are between 0 and 100, got {percentile:g}")


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Samples of a load test, one per request, in order."""

    samples: list[RequestSample]
    duration_s: float
    speculation: SpecCounters | None  # what the server's counters rose by; None if it has none
    num_failed_warmups: int


async def run_load(
    endpoint: Endpoint,
    requests: Sequence[BenchRequest],
    traffic: TrafficPlan,
    deadline_s: float,
    on_done: OnDone,
) -> LoadRun:
    """Send everything, the warm-ups first, and wait for all answers.

    Args:
        requests: the warm-ups and those to measure.
        deadline_s: of time.monotonic; what is not answered by then has failed.

    Raises:
        ConfigError: the endpoint takes no such prompts.
    """
    for request in requests:
        endpoint.request_body(request)  # refused before anything is sent
    warm_ups, measured = requests[: traffic.num_warmups], requests[traffic.num_warmups :]
    async with aclosing(Clients(endpoint.base_url, endpoint.headers)) as clients:
        warming = replace(traffic, request_rate=math.inf)
        warmed = await _send_all(clients, endpoint, warm_ups, warming, deadline_s, lambda _: None)
        with clients.lend() as client:
            before = await spec_counters(client)
        started_s = time.monotonic()
        samples = await _send_all(clients, endpoint, measured, traffic, deadline_s, on_done)
        duration_s = time.monotonic() - started_s
        with clients.lend() as client:
            after = await spec_counters(client)
    speculation = after - before if before is not None and after is not None else None
    num_failed = sum(sample.error is not None for sample in warmed)
    return LoadRun(samples, duration_s, speculation, num_failed)


async def with_model(endpoint: Endpoint) -> Endpoint:
    """The endpoint with the name of the server's first model, if it has none.

    Raises:
        ConfigError: the server cannot be reached or does not say.
    """
    if endpoint.model:
        return endpoint
    async with open_client(endpoint.base_url, endpoint.headers) as client:
        return replace(endpoint, model=await first_model(client))


def serve_report(
    run: LoadRun, requests: Sequence[BenchRequest], traffic: TrafficPlan, reporting: Reporting
) -> dict[str, Any]:
    """The result of one run, and what a reader has to know about its numbers.

    Args:
        requests: the warm-ups and those that were measured.
    """
    distinct = num_distinct_prompts(requests[traffic.num_warmups :])
    result: dict[str, Any] = {
        "num_prompts": len(run.samples),
        "num_distinct_prompts": distinct,
        "request_rate": "inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
        "burstiness": traffic.burstiness,
        "max_concurrency": traffic.max_concurrency,
        "num_warmups": traffic.num_warmups,
        "seed": traffic.seed,
        **load_report(run.samples, run.duration_s, reporting.metrics, reporting.percentiles),
    }
    if reporting.is_detailed:
        result |= detailed_report(run.samples)
    if run.speculation is not None and run.speculation.num_drafts:
        result |= acceptance_report(run.speculation)
    return result | {"notes": _notes(result, run, traffic)}


def _notes(result: dict[str, Any], run: LoadRun, traffic: TrafficPlan) -> list[str]:
    if traffic.is_closed_loop:
        notes = [
            "closed loop: a request is sent when an earlier one ends, and latencies count from "
            "the sending; how long users would queue is not in them (use --request-rate)"
        ]
    else:
        notes = ["open loop: latencies count from the scheduled arrival, waiting included"]
    per_chunk = result["tokens_per_chunk"]
    if per_chunk is not None and per_chunk > 1.05:
        notes.append(
            f"ITL is the time between chunks, which hold {per_chunk:.2f} tokens on average; TPOT "
            "is per token"
        )
    if (bunched := result["num_bunched_chunks"]) > MAX_BUNCHED_SHARE * result["num_chunks"]:
        notes.append(
            f"{bunched} of {result['num_chunks']} chunks came together with the one before, held "
            "up on the way (a server without TCP_NODELAY?) or sent so: TTFT is too long then, TPOT "
            "and ITL too short; E2EL is right"
        )
    if result["num_missing_usage"]:
        notes.append(
            f"{result['num_missing_usage']} answers came without usage: their chunks were counted "
            "as tokens, too few where a chunk holds several"
        )
    notes += repetition_notes(result["num_distinct_prompts"], result["num_prompts"])
    if run.num_failed_warmups:
        notes.append(f"{run.num_failed_warmups} of the warm-up requests failed")
    if result["failed"]:
        notes.append("failed requests are counted, and left out of all other numbers")
    return notes


async def _send_all(
    clients: Clients,
    endpoint: Endpoint,
    requests: Sequence[BenchRequest],
    traffic: TrafficPlan,
    deadline_s: float,
    on_done: OnDone,
) -> list[RequestSample]:
    if not requests:
        return []
    rng = np.random.default_rng(traffic.seed)
    times = arrival_times(len(requests), traffic.request_rate, traffic.burstiness, rng)
    room = asyncio.Semaphore(traffic.max_concurrency or len(requests))
    started_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - started_s

    async def one(request: BenchRequest, due_s: float) -> RequestSample:
        sample = RequestSample(due_s)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await asyncio.sleep(due_s - clock())
                async with room:
                    if traffic.is_closed_loop:
                        sample.due_s = clock()
                    with clients.lend() as client:
                        await send(client, endpoint, request, sample, clock)
        except TimeoutError:
            what = "not sent" if sample.sent_s is None else "unanswered"
            sample.error = f"{what} when the time was over"
            sample.ended_s = clock()
        on_done(sample)
        return sample

    return await asyncio.gather(*map(one, requests, times))
