"""Prometheus metrics of engines: vLLM's names after our prefix, and the time and tokens of
speculation.

Every metric has the label model_name. A counter's exposed name ends in _total.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from outdraft.core.decision import AlarmKind, Reason
from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.core.plan import StepStats
from outdraft.core.request import FinishReason
from outdraft.server.messages import EngineInfo, Steps

if TYPE_CHECKING:
    from outdraft.server.process_client import Supervisor  # which imports this

PREFIX = "outdraft:"

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

_DRAFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 63)  # tokens

_PARTS = ("draft", "target", "host")
# Values of labels.
_KNOWN: dict[str, Sequence[object]] = {
    "reason": tuple(Reason),
    "part": _PARTS,
    "alarm": tuple(AlarmKind),
}

# Labels beside model_name.
_LABELS: dict[str, Sequence[str]] = {
    "step_seconds": ("phase",),
    "request_success": ("finished_reason",),
    "spec_decode_num_accepted_tokens_per_pos": ("position",),
    "spec_decode_drafts_by_source": ("source",),
    "spec_decode_steps": ("reason",),
    "predicted_step_seconds": ("part",),
    "spec_decode_drafts_per_pos": ("source", "position"),
    "spec_decode_accepted_drafts_per_pos": ("source", "position"),
    "spec_decode_alarm_active": ("alarm", "source"),
    "spec_decode_draft_tokens_by_source": ("source",),
    "spec_decode_accepted_tokens_by_source": ("source",),
    "measured_step_seconds": ("part",),
    "spec_decode_alarms": ("alarm", "source"),
    "routed_requests": ("replica", "by"),
}
_GAUGES = {
    "num_requests_running": "Requests in the engine's batch.",
    "num_requests_waiting": "Requests waiting to be processed.",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1.",
    "estimated_tokens_per_second_without_speculation": "Estimate over recent steps without "
    "prompts: requests / seconds that the step would have taken without drafts, as predicted; as "
    "measured without its draft phase where lengths are fixed.",
    "spec_decode_is_drafting": "1 if the newest step with something to decide granted drafts, "
    "else 0. NaN before one.",
    "spec_decode_price": "Accepted tokens that a drafted row had to promise in the newest step "
    "with a price. NaN before one, and while lengths are fixed.",
    "spec_decode_predicted_gain": "Tokens per second against plain decoding, minus 1, as "
    "predicted for the newest step with a prediction. NaN before one.",
    "spec_decode_alarm_active": "1 while the alarm lasts, else 0.",
}
_COUNTERS = {
    "prompt_tokens": "Prompt tokens processed.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Prompt tokens looked up.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "num_preemptions": "Requests that lost their memory.",
    "spec_decode_num_drafts": "Drafts verified.",
    "spec_decode_num_draft_tokens": "Drafted tokens.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that the target accepted.",
    "step_seconds": "Seconds of engine steps by phase: draft (a network's drafts), verify (the "
    "target's forward, and choosing where the logits are all that it needs), sample (choosing "
    "otherwise), host (all the rest, drafts without a network included).",
    "request_success": "Sequences that ended, a request has n of them: stop, length, abort (the "
    "reader left), error (the engine failed).",
    "spec_decode_num_accepted_tokens_per_pos": "Accepted tokens by position (depth) in the draft, "
    "from 0.",
    "spec_decode_draft_tokens_by_source": "Drafted tokens by source.",
    "spec_decode_accepted_tokens_by_source": "Accepted tokens by source.",
    "spec_decode_drafts_by_source": "Drafts verified by source. One plus the accepted tokens per "
    "draft is the acceptance length.",
    "spec_decode_steps": "Steps with something to decide, by the reason for drafting, or for not "
    "drafting.",
    "predicted_step_seconds": "Predicted seconds of the engine's steps, of those with a "
    "prediction: draft, target (verify and sample), host.",
    "measured_step_seconds": "What the same steps took.",
    "spec_decode_drafts_per_pos": "Drafts that reached this position (depth, from 0), by source.",
    "spec_decode_accepted_drafts_per_pos": "Drafts that were accepted down to this position, by "
    "source. Divided by spec_decode_drafts_per_pos_total it is the acceptance curve.",
    "spec_decode_alarms": "Alarms that began.",
}
_HISTOGRAMS: Mapping[str, tuple[Sequence[float] | None, str]] = {  # None: sizes up to the context
    "time_to_first_token_seconds": (_TTFT_S, "Time to first token."),
    "inter_token_latency_seconds": (
        _TOKEN_S,
        "Time between two arrivals of tokens of a request; one may bring several tokens.",
    ),
    "request_time_per_output_token_seconds": (
        _TOKEN_S,
        "Time per token after the first, per request: of its longest sequence.",
    ),
    "e2e_request_latency_seconds": (_REQUEST_S, "Time from arrival to the end."),
    "request_queue_time_seconds": (_REQUEST_S, "Time until a request was first scheduled."),
    "request_prompt_tokens": (None, "Prompt tokens a request."),
    "request_generation_tokens": (None, "Generated tokens a request, all its sequences."),
    "chosen_draft_length": (
        _DRAFTS,
        "Drafted tokens per request and step that samples; 0: nothing was drafted.",
    ),
    "granted_draft_length": (
        _DRAFTS,
        "Tokens that a request was granted before the step was planned, per request and step that "
        "samples; 0: none.",
    ),
}


class Series:
    """Metrics after our prefix, all with the label model_name.

    `known`: values of other labels, each of which is there before anything happened to it.
    """

    def __init__(self, model_name: str, known: dict[str, Sequence[object]]) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._known = known
        self._metrics: dict[str, Any] = {}

    def define(
        self, kind: type[Counter | Gauge | Histogram], texts: Mapping[str, str], **options: Any
    ) -> None:
        """Add metrics of a kind, which has the options. `texts`: what they mean, by name."""
        for name, text in texts.items():
            labels = _LABELS.get(name, ())
            names = ["model_name", *labels]
            metric = kind(PREFIX + name, text, names, registry=self.registry, **options)
            self._metrics[name] = metric
            for values in product(*(self._known.get(label, ()) for label in labels)):
                self._of(name, *values)

    def add(self, name: str, count: float, *labels: object) -> None:
        self._of(name, *labels).inc(count)

    def set(self, name: str, value: float, *labels: object) -> None:
        self._of(name, *labels).set(value)

    def observe(self, name: str, value: float) -> None:
        self._of(name).observe(value)

    def _of(self, name: str, *labels: object) -> Any:
        return self._metrics[name].labels(self._model_name, *map(str, labels))


class LatencyWatcher(Protocol):
    """Is called with each latency as it is measured, in seconds."""

    def first_token(self, ttft_s: float) -> None:
        """A request's prompt was read, and its first token came."""
        ...

    def more_tokens(self, gap_s: float) -> None:
        """A request got further tokens, `gap_s` after the ones before."""
        ...


PLAIN_WINDOW = 200  # steps; older ones count for less and less


def plain_step_s(step: StepStats) -> float:
    """Seconds that the step would have taken without drafts."""
    if step.decision is not None and step.decision.is_predicted:
        return step.decision.plain_s
    return step.step_s - step.times.draft_s


class Metrics:
    """Owns a registry, and the numbers in it. For one thread: the front end's event loop."""

    def __init__(self, info: EngineInfo, model_name: str) -> None:
        self._watchers: list[LatencyWatcher] = []
        self._plain_tokens = self._plain_s = 0.0  # of recent steps
        known: dict[str, Sequence[object]] = {
            "phase": ("draft", "verify", "sample", "host"),
            "finished_reason": ("stop", "length", "abort", "error"),
            "position": range(info.num_speculative_tokens),
            "source": info.speculation_methods,  # zeros of what cannot draft would be noise
        }
        self._series = series = Series(model_name, known | _KNOWN)
        self.registry = series.registry
        series.define(Gauge, _GAUGES)
        series.define(Counter, _COUNTERS)
        for name in ("is_drafting", "price", "predicted_gain"):
            series.set(f"spec_decode_{name}", math.nan)
        powers = range(len(str(info.max_model_len)))  # 1, 2, 5, 10, 20, 50, ...
        sizes = [digit * 10**power for power in powers for digit in (1, 2, 5)]
        sizes = [size for size in sizes if size <= info.max_model_len]
        for name, (buckets, text) in _HISTOGRAMS.items():
            series.define(Histogram, {name: text}, buckets=buckets or sizes)
        self._estimate()

    @property
    def plain_tokens_per_s(self) -> float:
        """The estimated speed without speculation; NaN before the first token."""
        return self._plain_tokens / self._plain_s if self._plain_s else math.nan

    def watch(self, watcher: LatencyWatcher) -> None:
        """Tell it of the latencies that come."""
        self._watchers.append(watcher)

    def observe_steps(self, steps: Steps) -> None:
        """Count the steps that the engine reports."""
        self._series.set("num_requests_running", steps.num_running)
        self._series.set("num_requests_waiting", steps.num_waiting)
        self._series.set("kv_cache_usage_perc", steps.kv_usage)
        for step in steps.steps:
            self._observe_step(step)
        self._estimate()

    def observe_request(
        self,
        output: RequestOutput,
        gained: Sequence[CompletionOutput],
        last_token_s: float | None,
        num_preemptions: int,
    ) -> None:
        """Count what a request gained.

        `last_token_s`, `num_preemptions`: of the request before it gained that.
        """
        has_failed = output.error is not None
        if not has_failed and any(delta.token_ids for delta in gained):
            self._tokens_came(output, last_token_s)
        self._series.add("num_preemptions", output.metrics.num_preemptions - num_preemptions)
        for delta in gained:
            if delta.finish_reason is not None:
                self._series.add("request_success", 1, delta.finish_reason)
        if output.finished and not has_failed:
            self._finished(output)

    def observe_unfinished(self, num_sequences: int, reason: FinishReason) -> None:
        """Count sequences of a request that has ended before them."""
        self._series.add("request_success", num_sequences, str(reason))

    def _tokens_came(self, output: RequestOutput, before_s: float | None) -> None:
        """A request got tokens. `before_s`: when it got others; None: these are its first."""
        times = output.metrics
        assert times.last_token_s is not None
        assert times.ttft_s is not None
        if before_s is not None:
            gap_s = times.last_token_s - before_s
            self._series.observe("inter_token_latency_seconds", gap_s)
            for watcher in self._watchers:
                watcher.more_tokens(gap_s)
            return
        num_prompt = len(output.prompt_token_ids)
        self._series.add("prompt_tokens", num_prompt)
        self._series.add("prefix_cache_queries", num_prompt)
        self._series.add("prefix_cache_hits", output.num_cached_tokens)
        self._series.observe("time_to_first_token_seconds", times.ttft_s)
        for watcher in self._watchers:
            watcher.first_token(times.ttft_s)

    def _finished(self, output: RequestOutput) -> None:
        """Count a request all of whose sequences ended."""
        lengths = [len(completion.token_ids) for completion in output.outputs]
        times, observe = output.metrics, self._series.observe
        observe("request_prompt_tokens", len(output.prompt_token_ids))
        observe("request_generation_tokens", sum(lengths))
        if times.first_scheduled_s is not None:
            observe("request_queue_time_seconds", times.first_scheduled_s - times.arrival_s)
        if times.finished_s is not None:
            observe("e2e_request_latency_seconds", times.finished_s - times.arrival_s)
        if times.first_token_s is not None and times.last_token_s is not None and max(lengths) > 1:
            seconds = times.last_token_s - times.first_token_s
            observe("request_time_per_output_token_seconds", seconds / (max(lengths) - 1))

    def _observe_step(self, step: StepStats) -> None:
        times = step.times
        self._series.add("generation_tokens", step.num_emitted)
        self._series.add("spec_decode_num_drafts", step.num_drafts)
        self._series.add("spec_decode_num_draft_tokens", step.num_draft_tokens)
        self._series.add("spec_decode_num_accepted_tokens", step.num_accepted_tokens)
        for name, counts in {
            "step_seconds": {
                "draft": times.draft_s,
                "verify": times.verify_s,
                "sample": times.sample_s,
                "host": step.host_s,
            },
            "spec_decode_num_accepted_tokens_per_pos": dict(enumerate(step.accepted_at)),
            "spec_decode_draft_tokens_by_source": step.drafted_by_source,
            "spec_decode_accepted_tokens_by_source": step.accepted_by_source,
            "spec_decode_drafts_by_source": step.drafts_by_source,
        }.items():
            for value, count in counts.items():
                self._series.add(name, count, value)
        for length in step.draft_lengths:
            self._series.observe("chosen_draft_length", length)
        if step.draft_lengths and step.num_rows == len(step.draft_lengths) + step.num_draft_tokens:
            kept = 1 - 1 / PLAIN_WINDOW
            self._plain_tokens = kept * self._plain_tokens + len(step.draft_lengths)
            self._plain_s = kept * self._plain_s + plain_step_s(step)
        _observe_decision(self._series, step)

    def _estimate(self) -> None:
        name = "estimated_tokens_per_second_without_speculation"
        self._series.set(name, self.plain_tokens_per_s)


def _observe_decision(series: Series, step: StepStats) -> None:
    """Count a step."""
    for length in step.granted_lengths:
        series.observe("granted_draft_length", length)
    for source, levels, accepted in step.draft_levels:
        for position in range(levels):
            is_kept = int(position < accepted)
            series.add("spec_decode_drafts_per_pos", 1, source, position)
            series.add("spec_decode_accepted_drafts_per_pos", is_kept, source, position)
    for alarm in step.alarms:
        series.add("spec_decode_alarms", int(alarm.is_on), alarm.kind, alarm.source)
        series.set("spec_decode_alarm_active", int(alarm.is_on), alarm.kind, alarm.source)
    if (decision := step.decision) is None:
        return
    series.add("spec_decode_steps", 1, decision.reason)
    series.set("spec_decode_is_drafting", int(any(step.granted_lengths)))
    if decision.price is not None:
        series.set("spec_decode_price", decision.price)
    if not decision.is_predicted:
        return
    series.set("spec_decode_predicted_gain", decision.gain)
    predicted = (decision.draft_s, decision.target_s, decision.host_s)
    measured = (step.times.draft_s, step.times.verify_s + step.times.sample_s, step.host_s)
    for part, predicted_s, measured_s in zip(_PARTS, predicted, measured, strict=True):
        series.add("predicted_step_seconds", predicted_s, part)
        series.add("measured_step_seconds", measured_s, part)


class ReplicaMetrics(Collector):
    """Counts what a pool and its replicas do: metrics of one engine, and `replica` as a label more.

    A replica's label is its place, a small number. The replica that replaces it goes on with the
    same counters.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._watchers: list[LatencyWatcher] = []
        self._step_watchers: list[Callable[[Steps], None]] = []
        self._replicas: dict[int, Metrics] = {}
        self._newest: dict[int, Steps] = {}
        self._series = series = Series(model_name, {})
        self.registry = series.registry
        self.registry.register(self)
        series.define(Gauge, {"replicas": "Replicas that are ready."})
        series.define(
            Counter,
            {
                "routed_requests": "Requests sent to a replica, by why: prefix (it has the "
                "beginning of the prompt) or load (it has least to compute).",
                "retried_requests": "Requests sent again because their replica was lost.",
            },
        )

    @property
    def all(self) -> Collection[Metrics]:
        """Metrics of each replica there has been, by its place."""
        return self._replicas.values()

    def watch(self, watcher: LatencyWatcher) -> None:
        """Tell it of the latencies that come."""
        self._watchers.append(watcher)
        for metrics in self.all:
            metrics.watch(watcher)

    def watch_steps(self, on_steps: Callable[[Steps], None]) -> None:
        """Have a function called with the steps of each report, and the load of all replicas."""
        self._step_watchers.append(on_steps)

    def joined(self, place: int, client: "Supervisor") -> None:
        """A replica is ready, at a place that no other one has now."""
        if (metrics := self._replicas.get(place)) is None:
            metrics = self._replicas[place] = Metrics(client.info, self._model_name)
            for watcher in self._watchers:
                metrics.watch(watcher)
            for by in ("prefix", "load"):
                self._series.add("routed_requests", 0, place, by)
        client.observe(metrics)
        client.watch(lambda steps: self._observe(place, steps))
        self._series.add("replicas", 1)

    def left(self, place: int) -> None:
        """It has ended."""
        self._replicas[place].observe_steps(Steps([], 0, 0, 0.0))
        self._newest.pop(place, None)
        self._series.add("replicas", -1)

    def routed(self, place: int, num_matched: int) -> None:
        """A request was sent to it; it knows `num_matched` blocks of the prompt."""
        self._series.add("routed_requests", 1, place, "prefix" if num_matched else "load")

    def retried(self) -> None:
        """A request was lost before it brought anything, and is sent again."""
        self._series.add("retried_requests", 1)

    @property
    def plain_tokens_per_s(self) -> float:
        """The estimated speed without speculation of all together; NaN before the first token."""
        speeds = [one.plain_tokens_per_s for one in self.all]
        measured = [speed for speed in speeds if not math.isnan(speed)]
        return sum(measured) if measured else math.nan

    def _observe(self, place: int, steps: Steps) -> None:
        self._newest[place] = steps
        newest = self._newest.values()
        news = Steps(
            steps.steps,
            sum(one.num_running for one in newest),
            sum(one.num_waiting for one in newest),
            sum(one.kv_usage for one in newest) / len(newest),
        )
        for on_steps in self._step_watchers:
            on_steps(news)

    def collect(self) -> Iterable[Metric]:
        """Metrics of all replicas, which have the same names."""
        merged: dict[str, Metric] = {}
        for place, metrics in self._replicas.items():
            for family in metrics.registry.collect():
                one = merged.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    labels = {**sample.labels, "replica": str(place)}
                    one.samples.append(sample._replace(labels=labels))
        return merged.values()


def metrics_router(registry: CollectorRegistry) -> APIRouter:
    """GET /metrics, in Prometheus's text format, whatever the scraper would accept.

    Its other formats are no choice: prometheus_client turns the colon of the names into an
    underscore in them.
    """
    router = APIRouter()

    # async: the event loop alone reads and writes the numbers, a `def` route would use a thread.
    async def expose() -> Response:
        text = generate_latest(registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    router.add_api_route("/metrics", expose, include_in_schema=False)
    return router
