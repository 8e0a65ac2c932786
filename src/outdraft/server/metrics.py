"""Prometheus metrics: vLLM's names behind our prefix, and where speculation's time and tokens go.

Steps come from EngineClient.watch, requests from ObservedClient. Every metric has the label
model_name. A counter's exposed name ends in _total.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from outdraft.core.outputs import RequestOutput
from outdraft.core.plan import StepStats
from outdraft.server.messages import EngineInfo, Steps
from outdraft.server.plain_speed import PlainSpeed

PREFIX = "outdraft:"
FINISHED_REASONS = ("stop", "length", "abort", "error")

# vLLM's buckets, so that its dashboards' quantiles compare; the small ones are ours.
_TTFT_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0),
    *(50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_DRAFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 63)


class LatencyWatcher(Protocol):
    """Whoever wants to hear each latency as it is measured, in seconds."""

    def first_token(self, ttft_s: float) -> None:
        """See Metrics.first_token."""
        ...

    def more_tokens(self, gap_s: float) -> None:
        """See Metrics.more_tokens."""
        ...


class Metrics:
    """Owns a registry, and the numbers in it. For one thread: the front end's event loop."""

    def __init__(self, info: EngineInfo, model_name: str) -> None:
        self.registry = CollectorRegistry()
        make = _Maker(self.registry, model_name)
        self._engine = _EngineMetrics(make)
        self._speculation = _SpeculationMetrics(make, info)
        self._requests = _RequestMetrics(make, info.max_model_len)
        self._watchers: list[LatencyWatcher] = []

    @property
    def plain_tokens_per_s(self) -> float:
        """The estimated speed without speculation; NaN before the first token."""
        return self._speculation.plain_tokens_per_s

    def watch(self, watcher: "LatencyWatcher") -> None:
        """Tell it of the latencies that come."""
        self._watchers.append(watcher)

    def observe_steps(self, steps: Steps) -> None:
        """For EngineClient.watch."""
        self._engine.observe_state(steps)
        for step in steps.steps:
            self._engine.observe(step)
            self._speculation.observe(step)

    def first_token(self, output: RequestOutput) -> None:
        """A request's prompt was read, and its first token came."""
        self._requests.first_token(output)
        if output.metrics.ttft_s is not None:
            for watcher in self._watchers:
                watcher.first_token(output.metrics.ttft_s)

    def more_tokens(self, gap_s: float) -> None:
        """A request got further tokens, so long after the ones before."""
        self._requests.inter_token.observe(gap_s)
        for watcher in self._watchers:
            watcher.more_tokens(gap_s)

    def preempted(self, count: int) -> None:
        """A request lost its memory, so many times."""
        self._requests.preemptions.inc(count)

    def sequences_ended(self, reason: str, count: int) -> None:
        """Sequences of a request ended, for one of FINISHED_REASONS."""
        self._requests.success(reason).inc(count)

    def finished(self, output: RequestOutput) -> None:
        """All sequences of a request ended, and were read to their end."""
        self._requests.finished(output)


def metrics_router(metrics: Metrics) -> APIRouter:
    """GET /metrics, in Prometheus's text format, whatever the scraper would accept.

    Its other formats are no choice: prometheus_client turns the colon of the names into an
    underscore in them.
    """
    router = APIRouter()

    # async: the event loop alone reads and writes the numbers, a `def` route would use a thread.
    async def expose() -> Response:
        text = generate_latest(metrics.registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    router.add_api_route("/metrics", expose, include_in_schema=False)
    return router


class _Maker:
    """Makes metrics with the prefix, and the model's name as their first label."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._registry = registry
        self._model_name = model_name

    def gauge(self, name: str, text: str) -> Gauge:
        return Gauge(PREFIX + name, text, ["model_name"], registry=self._registry).labels(
            self._model_name
        )

    def counter(self, name: str, text: str) -> Counter:
        return Counter(PREFIX + name, text, ["model_name"], registry=self._registry).labels(
            self._model_name
        )

    def counters(
        self, name: str, text: str, label: str, known: Sequence[str]
    ) -> Callable[[str], Counter]:
        """A counter per value of a label; the known ones are there from the start, at 0."""
        counter = Counter(PREFIX + name, text, ["model_name", label], registry=self._registry)
        for value in known:
            counter.labels(self._model_name, value)
        return lambda value: counter.labels(self._model_name, value)

    def histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            PREFIX + name, text, ["model_name"], registry=self._registry, buckets=buckets
        ).labels(self._model_name)


class _EngineMetrics:
    """What the engine holds, and where its time goes."""

    def __init__(self, make: _Maker) -> None:
        self._running = make.gauge("num_requests_running", "Requests in the engine's batch.")
        self._waiting = make.gauge("num_requests_waiting", "Requests waiting to be processed.")
        self._kv_usage = make.gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        self._generated = make.counter("generation_tokens", "Generated tokens.")
        self._step_s = make.counters(
            "step_seconds",
            "Seconds of engine steps by phase: draft (a network's drafts), verify (the target's "
            "forward), sample (choosing and accepting), host (all the rest, drafts without a "
            "network included).",
            "phase",
            ("draft", "verify", "sample", "host"),
        )

    def observe_state(self, steps: Steps) -> None:
        self._running.set(steps.num_running)
        self._waiting.set(steps.num_waiting)
        self._kv_usage.set(steps.kv_usage)

    def observe(self, step: StepStats) -> None:
        self._generated.inc(step.num_emitted)
        self._step_s("draft").inc(step.times.draft_s)
        self._step_s("verify").inc(step.times.verify_s)
        self._step_s("sample").inc(step.times.sample_s)
        self._step_s("host").inc(step.host_s)


class _SpeculationMetrics:
    """What was drafted, what was accepted, and what it is worth."""

    def __init__(self, make: _Maker, info: EngineInfo) -> None:
        sources = info.speculation_methods  # zeros of what cannot draft would be noise
        self._plain_speed = PlainSpeed()
        self._drafts = make.counter("spec_decode_num_drafts", "Drafts verified.")
        self._drafted = make.counter("spec_decode_num_draft_tokens", "Drafted tokens.")
        self._accepted = make.counter(
            "spec_decode_num_accepted_tokens", "Drafted tokens that the target accepted."
        )
        self._accepted_at = make.counters(
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by position (depth) in the draft, from 0.",
            "position",
            [str(position) for position in range(info.num_speculative_tokens)],
        )
        self._drafted_by = make.counters(
            "spec_decode_draft_tokens_by_source", "Drafted tokens by source.", "source", sources
        )
        self._accepted_by = make.counters(
            "spec_decode_accepted_tokens_by_source", "Accepted tokens by source.", "source", sources
        )
        self._drafts_by = make.counters(
            "spec_decode_drafts_by_source",
            "Drafts verified, by the source that drafted first: another may have gone on.",
            "source",
            sources,
        )
        self._accepted_of = make.counters(
            "spec_decode_accepted_tokens_by_first_source",
            "Accepted tokens by the source that drafted first, whoever drafted the token. One plus "
            "these per spec_decode_drafts_by_source_total is the acceptance length by source.",
            "source",
            sources,
        )
        self._draft_length = make.histogram(
            "chosen_draft_length",
            "Drafted tokens per request and step that samples; 0: nothing was drafted.",
            _DRAFTS,
        )
        self._without = make.gauge(
            "estimated_tokens_per_second_without_speculation",
            "Estimate over recent steps, per second of step time: the tokens emitted / the seconds "
            "they would have taken at one token per request and step. A step without drafts costs "
            "the running average of such steps of the same batch size or, where there were none, "
            "the measured step without its draft phase and without the measured cost of the "
            "drafted rows. Low by the cost of drafted rows while the number of rows never varies. "
            "Compare with generation_tokens_total over step_seconds_total. NaN before any token.",
        )
        self._without.set(self._plain_speed.tokens_per_s)

    @property
    def plain_tokens_per_s(self) -> float:
        return self._plain_speed.tokens_per_s

    def observe(self, step: StepStats) -> None:
        self._drafts.inc(step.num_drafts)
        self._drafted.inc(step.num_draft_tokens)
        self._accepted.inc(step.num_accepted_tokens)
        for position, count in enumerate(step.accepted_at):
            self._accepted_at(str(position)).inc(count)
        for source, count in step.drafted_by_source.items():
            self._drafted_by(str(source)).inc(count)
        for source, count in step.accepted_by_source.items():
            self._accepted_by(str(source)).inc(count)
        for source, count in step.drafts_by_source.items():
            self._drafts_by(str(source)).inc(count)
        for source, count in step.accepted_by_first_source.items():
            self._accepted_of(str(source)).inc(count)
        for length in step.draft_lengths:
            self._draft_length.observe(length)
        self._plain_speed.add(step)
        self._without.set(self._plain_speed.tokens_per_s)


class _RequestMetrics:
    """How long requests took, and how large they were."""

    def __init__(self, make: _Maker, max_model_len: int) -> None:
        sizes = _sizes(max_model_len)
        self._prompt_total = make.counter("prompt_tokens", "Prompt tokens processed.")
        self._queries = make.counter("prefix_cache_queries", "Prompt tokens looked up.")
        self._hits = make.counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self.preemptions = make.counter("num_preemptions", "Requests that lost their memory.")
        self.success = make.counters(
            "request_success",
            "Sequences that ended, a request has n of them: stop, length, abort (the reader left), "
            "error (the engine failed).",
            "finished_reason",
            FINISHED_REASONS,
        )
        self._ttft = make.histogram("time_to_first_token_seconds", "Time to first token.", _TTFT_S)
        self.inter_token = make.histogram(
            "inter_token_latency_seconds",
            "Time between two arrivals of tokens of a request; one may bring several tokens.",
            _TOKEN_S,
        )
        self._tpot = make.histogram(
            "request_time_per_output_token_seconds",
            "Time per token after the first, per request: of its longest sequence.",
            _TOKEN_S,
        )
        self._e2e = make.histogram(
            "e2e_request_latency_seconds", "Time from arrival to the end.", _REQUEST_S
        )
        self._queue = make.histogram(
            "request_queue_time_seconds", "Time until a request was first scheduled.", _REQUEST_S
        )
        self._prompt = make.histogram("request_prompt_tokens", "Prompt tokens a request.", sizes)
        self._generated = make.histogram(
            "request_generation_tokens", "Generated tokens a request, all its sequences.", sizes
        )

    def first_token(self, output: RequestOutput) -> None:
        num_prompt = len(output.prompt_token_ids)
        self._prompt_total.inc(num_prompt)
        self._queries.inc(num_prompt)
        self._hits.inc(output.num_cached_tokens)
        if output.metrics.ttft_s is not None:
            self._ttft.observe(output.metrics.ttft_s)

    def finished(self, output: RequestOutput) -> None:
        lengths = [len(completion.token_ids) for completion in output.outputs]
        self._prompt.observe(len(output.prompt_token_ids))
        self._generated.observe(sum(lengths))
        times = output.metrics
        if times.first_scheduled_s is not None:
            self._queue.observe(times.first_scheduled_s - times.arrival_s)
        if times.finished_s is not None:
            self._e2e.observe(times.finished_s - times.arrival_s)
        if times.first_token_s is not None and times.last_token_s is not None and max(lengths) > 1:
            self._tpot.observe((times.last_token_s - times.first_token_s) / (max(lengths) - 1))


def _sizes(highest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50, ... up to the highest."""
    steps = [digit * 10**power for power in range(len(str(highest))) for digit in (1, 2, 5)]
    return [size for size in steps if size <= highest]
