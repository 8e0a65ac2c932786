"""Prometheus metrics of engines: vLLM's names after our prefix, and the time and tokens of
speculation.

Every metric has the label model_name. A counter's exposed name ends in _total.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

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

# Texts by name; labels beside model_name follow the name.
_GAUGES = {
    "num_requests_running": "Requests in the engine's batch.",
    "num_requests_waiting": "Requests waiting to be processed.",
    "kv_cache_usage_perc": "Share of the KV blocks in use, 0 to 1.",
    "estimated_tokens_per_second_without_speculation": "Estimate over recent steps without "
    "prompts: requests / seconds that the step would have taken without drafts, as predicted; as "
    "measured without its draft phase where lengths are fixed.",
    "spec_decode_is_drafting": "1 if the newest step with something to decide granted drafts, else "
    "0. NaN before one.",
    "spec_decode_price": "Accepted tokens that a drafted row had to promise in the newest step "
    "with a price. NaN before one, and while lengths are fixed.",
    "spec_decode_predicted_gain": "Tokens per second against plain decoding, minus 1, as predicted "
    "for the newest step with a prediction. NaN before one.",
    "spec_decode_alarm_active alarm source": "1 while the alarm lasts, else 0.",
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
    "step_seconds phase": "Seconds of engine steps by phase: draft (a network's drafts), verify "
    "(the target's forward, and choosing where the logits are all that it needs), sample (choosing "
    "otherwise), host (all the rest, drafts without a network included).",
    "request_success finished_reason": "Sequences that ended, a request has n of them: stop, "
    "length, abort (the reader left), error (the engine failed).",
    "spec_decode_num_accepted_tokens_per_pos position": "Accepted tokens by position (depth) in "
    "the draft, from 0.",
    "spec_decode_draft_tokens_by_source source": "Drafted tokens by source.",
    "spec_decode_accepted_tokens_by_source source": "Accepted tokens by source.",
    "spec_decode_drafts_by_source source": "Drafts verified by source. One plus the accepted "
    "tokens per draft is the acceptance length.",
    "spec_decode_steps reason": "Steps with something to decide, by the reason for drafting, or "
    "for not drafting.",
    "predicted_step_seconds part": "Predicted seconds of the engine's steps, of those with a "
    "prediction: draft, target (verify and sample), host.",
    "measured_step_seconds part": "What the same steps took.",
    "spec_decode_drafts_per_pos source position": "Drafts that reached this position (depth, from "
    "0), by source.",
    "spec_decode_accepted_drafts_per_pos source position": "Drafts that were accepted down to this "
    "position, by source. Divided by spec_decode_drafts_per_pos_total it is the acceptance curve.",
    "spec_decode_alarms alarm source": "Alarms that began.",
}
_HISTOGRAMS: Mapping[Sequence[float] | None, Mapping[str, str]] = {  # by their buckets
    _TTFT_S: {"time_to_first_token_seconds": "Time to first token."},
    _TOKEN_S: {
        "inter_token_latency_seconds": "Time between two arrivals of tokens of a request; one may "
        "bring several tokens.",
        "request_time_per_output_token_seconds": "Time per token after the first, per request: of "
        "its longest sequence.",
    },
    _REQUEST_S: {
        "e2e_request_latency_seconds": "Time from arrival to the end.",
        "request_queue_time_seconds": "Time until a request was first scheduled.",
    },
    None: {  # sizes up to the context
        "request_prompt_tokens": "Prompt tokens a request.",
        "request_generation_tokens": "Generated tokens a request, all its sequences.",
    },
    _DRAFTS: {
        "chosen_draft_length": "Drafted tokens per request and step that samples; 0: nothing was "
        "drafted.",
        "granted_draft_length": "Tokens that a request was granted before the step was planned, "
        "per request and step that samples; 0: none.",
    },
}


class Series:
    """Metrics after our prefix, in one registry.

    Args:
        own: the labels that all of them have, and their values.
        known: values of other labels, each of which is there before anything happened to it.
        beside: series of the same registry; metrics that several of them define are one.
    """

    def __init__(
        self,
        own: Mapping[str, object],
        known: Mapping[str, Sequence[object]],
        beside: "Series | None" = None,
    ) -> None:
        self.registry: CollectorRegistry = beside.registry if beside else CollectorRegistry()
        self._metrics: dict[str, Any] = beside._metrics if beside else {}
        self._own, self._known = own, known

    def define(
        self, kind: type[Counter | Gauge | Histogram], texts: Mapping[str, str], **options: Any
    ) -> None:
        """Add metrics of a kind, which has the options. `texts`: see above."""
        for key, text in texts.items():
            name, *labels = key.split()
            if name not in self._metrics:
                names = [*self._own, *labels]
                metric = kind(PREFIX + name, text, names, registry=self.registry, **options)
                self._metrics[name] = metric
            for values in product(*(self._known.get(label, ()) for label in labels)):
                self.of(name, *values)

    def of(self, name: str, *labels: object) -> Any:
        """The metric that has these values of its labels."""
        return self._metrics[name].labels(*self._own.values(), *labels)


# Is called with each latency as it is measured: its seconds, and whether it is the time to a
# request's first token; else it is that between two arrivals of further ones.
LatencyWatcher = Callable[[float, bool], None]
PLAIN_WINDOW = 200  # steps; older ones count for less and less


class Metrics:
    """The numbers of one engine. For one thread: the front end's event loop.

    Args:
        replica, beside: the engine's place among several, and series of their registry.

    Attributes:
        watchers: of latencies; the list may grow.
    """

    def __init__(
        self,
        info: EngineInfo,
        model_name: str,
        watchers: list[LatencyWatcher] | None = None,
        replica: int | None = None,
        beside: Series | None = None,
    ) -> None:
        self.watchers: list[LatencyWatcher] = [] if watchers is None else watchers
        self._plain_tokens = self._plain_s = 0.0  # of recent steps
        known: dict[str, Sequence[object]] = {
            "phase": ("draft", "verify", "sample", "host"),
            "finished_reason": ("stop", "length", "abort", "error"),
            "position": range(info.num_speculative_tokens),
            "source": info.speculation_methods,  # zeros of what cannot draft would be noise
            "reason": tuple(Reason),
            "part": _PARTS,
            "alarm": tuple(AlarmKind),
        }
        own: dict[str, object] = {"model_name": model_name}
        series = Series(own if replica is None else own | {"replica": replica}, known, beside)
        self.registry, self._of = series.registry, series.of
        series.define(Gauge, _GAUGES)
        series.define(Counter, _COUNTERS)
        for name in ("is_drafting", "price", "predicted_gain"):
            self._of(f"spec_decode_{name}").set(math.nan)
        powers = range(len(str(info.max_model_len)))  # 1, 2, 5, 10, 20, 50, ...
        sizes = [digit * 10**power for power in powers for digit in (1, 2, 5)]
        sizes = [size for size in sizes if size <= info.max_model_len]
        for buckets, texts in _HISTOGRAMS.items():
            series.define(Histogram, texts, buckets=buckets or sizes)
        self._estimate()

    @property
    def plain_tokens_per_s(self) -> float:
        """The estimated speed without speculation; NaN before the first token."""
        return self._plain_tokens / self._plain_s if self._plain_s else math.nan

    def observe_steps(self, steps: Steps) -> None:
        """Count the steps that the engine reports."""
        self._of("num_requests_running").set(steps.num_running)
        self._of("num_requests_waiting").set(steps.num_waiting)
        self._of("kv_cache_usage_perc").set(steps.kv_usage)
        for step in steps.steps:
            self._observe_step(step)
            self._observe_decision(step)
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
        self._of("num_preemptions").inc(output.metrics.num_preemptions - num_preemptions)
        for delta in gained:
            if delta.finish_reason is not None:
                self._of("request_success", delta.finish_reason).inc()
        if output.finished and not has_failed:
            self._finished(output)

    def observe_unfinished(self, num_sequences: int, reason: FinishReason) -> None:
        """Count sequences of a request that has ended before them."""
        self._of("request_success", reason).inc(num_sequences)

    def _tokens_came(self, output: RequestOutput, before_s: float | None) -> None:
        """A request got tokens. `before_s`: when it got others; None: these are its first."""
        times = output.metrics
        assert times.last_token_s is not None
        assert times.ttft_s is not None
        if before_s is None:
            num_prompt, latency_s = len(output.prompt_token_ids), times.ttft_s
            self._of("prompt_tokens").inc(num_prompt)
            self._of("prefix_cache_queries").inc(num_prompt)
            self._of("prefix_cache_hits").inc(output.num_cached_tokens)
            self._of("time_to_first_token_seconds").observe(latency_s)
        else:
            latency_s = times.last_token_s - before_s
            self._of("inter_token_latency_seconds").observe(latency_s)
        for watcher in self.watchers:
            watcher(latency_s, before_s is None)

    def _finished(self, output: RequestOutput) -> None:
        """Count a request all of whose sequences ended."""
        lengths = [len(completion.token_ids) for completion in output.outputs]
        times = output.metrics
        self._of("request_prompt_tokens").observe(len(output.prompt_token_ids))
        self._of("request_generation_tokens").observe(sum(lengths))
        if times.first_scheduled_s is not None:
            queue_s = times.first_scheduled_s - times.arrival_s
            self._of("request_queue_time_seconds").observe(queue_s)
        if times.finished_s is not None:
            self._of("e2e_request_latency_seconds").observe(times.finished_s - times.arrival_s)
        if times.first_token_s is not None and times.last_token_s is not None and max(lengths) > 1:
            token_s = (times.last_token_s - times.first_token_s) / (max(lengths) - 1)
            self._of("request_time_per_output_token_seconds").observe(token_s)

    def _observe_step(self, step: StepStats) -> None:
        times = step.times
        self._of("generation_tokens").inc(step.num_emitted)
        for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
            self._of(f"spec_decode_{name}").inc(getattr(step, name))
        phases = {"draft": times.draft_s, "verify": times.verify_s, "sample": times.sample_s}
        for name, counts in {
            "step_seconds": phases | {"host": step.host_s},
            "spec_decode_num_accepted_tokens_per_pos": dict(enumerate(step.accepted_at)),
            "spec_decode_draft_tokens_by_source": step.drafted_by_source,
            "spec_decode_accepted_tokens_by_source": step.accepted_by_source,
            "spec_decode_drafts_by_source": step.drafts_by_source,
        }.items():
            for value, count in counts.items():
                self._of(name, value).inc(count)
        for length in step.draft_lengths:
            self._of("chosen_draft_length").observe(length)
        if step.draft_lengths and step.num_rows == len(step.draft_lengths) + step.num_draft_tokens:
            kept = 1 - 1 / PLAIN_WINDOW
            self._plain_tokens = kept * self._plain_tokens + len(step.draft_lengths)
            decision, plain_s = step.decision, step.step_s - times.draft_s
            if decision is not None and decision.is_predicted:
                plain_s = decision.plain_s
            self._plain_s = kept * self._plain_s + plain_s  # as steps without drafts would take

    def _observe_decision(self, step: StepStats) -> None:
        for length in step.granted_lengths:
            self._of("granted_draft_length").observe(length)
        for source, levels, accepted in step.draft_levels:
            for position in range(levels):
                self._of("spec_decode_drafts_per_pos", source, position).inc()
                accepted_drafts = self._of("spec_decode_accepted_drafts_per_pos", source, position)
                accepted_drafts.inc(position < accepted)
        for alarm in step.alarms:
            self._of("spec_decode_alarms", alarm.kind, alarm.source).inc(alarm.is_on)
            self._of("spec_decode_alarm_active", alarm.kind, alarm.source).set(alarm.is_on)
        if (decision := step.decision) is None:
            return
        self._of("spec_decode_steps", decision.reason).inc()
        self._of("spec_decode_is_drafting").set(any(step.granted_lengths))
        if decision.price is not None:
            self._of("spec_decode_price").set(decision.price)
        if not decision.is_predicted:
            return
        self._of("spec_decode_predicted_gain").set(decision.gain)
        predicted = (decision.draft_s, decision.target_s, decision.host_s)
        measured = (step.times.draft_s, step.times.verify_s + step.times.sample_s, step.host_s)
        for part, predicted_s, measured_s in zip(_PARTS, predicted, measured, strict=True):
            self._of("predicted_step_seconds", part).inc(predicted_s)
            self._of("measured_step_seconds", part).inc(measured_s)

    def _estimate(self) -> None:
        name = "estimated_tokens_per_second_without_speculation"
        self._of(name).set(self.plain_tokens_per_s)


class ReplicaMetrics:
    """Counts what a pool and its replicas do: metrics of one engine, and `replica` as a label more.

    A replica's label is its place, a small number. The replica that replaces it goes on with the
    same counters.

    Attributes:
        watchers: of the latencies of all replicas.
        step_watchers: are called with the steps of each report, and the load of all replicas.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.watchers: list[LatencyWatcher] = []
        self.step_watchers: list[Callable[[Steps], None]] = []
        self._replicas: dict[int, Metrics] = {}  # all there have been, by place
        self._newest: dict[int, Steps] = {}
        self._series = series = Series({"model_name": model_name}, {})
        self.registry, self._of = series.registry, series.of
        series.define(Gauge, {"replicas": "Replicas that are ready."})
        series.define(
            Counter,
            {
                "routed_requests replica by": "Requests sent to a replica, by why: prefix (it has "
                "the beginning of the prompt) or load (it has least to compute).",
                "retried_requests": "Requests sent again because their replica was lost.",
            },
        )

    def joined(self, place: int, client: "Supervisor") -> None:
        """A replica is ready, at a place that no other one has now."""
        if (metrics := self._replicas.get(place)) is None:
            shared = self.watchers, place, self._series
            metrics = self._replicas[place] = Metrics(client.info, self._model_name, *shared)
            for by in ("prefix", "load"):
                self._of("routed_requests", place, by)
        client.observe(metrics)
        client.watchers.append(lambda steps: self._observe(place, steps))
        self._of("replicas").inc()

    def left(self, place: int) -> None:
        """It has ended."""
        self._replicas[place].observe_steps(Steps([], 0, 0, 0.0))
        self._newest.pop(place, None)
        self._of("replicas").dec()

    def routed(self, place: int, num_matched: int) -> None:
        """A request was sent to it; it knows `num_matched` blocks of the prompt."""
        self._of("routed_requests", place, "prefix" if num_matched else "load").inc()

    def retried(self) -> None:
        """A request was lost before it brought anything, and is sent again."""
        self._of("retried_requests").inc()

    @property
    def plain_tokens_per_s(self) -> float:
        """The estimated speed without speculation of all together; NaN before the first token."""
        speeds = [one.plain_tokens_per_s for one in self._replicas.values()]
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
        for on_steps in self.step_watchers:
            on_steps(news)


def metrics_router(registry: CollectorRegistry) -> APIRouter:
    """GET /metrics, in Prometheus's text format, whatever the scraper would accept.

    Its other formats are no choice: prometheus_client turns the colon of the names into an
    underscore in them.
    """
    router = APIRouter(include_in_schema=False)

    # async: the event loop alone reads and writes the numbers, a `def` route would use a thread.
    @router.get("/metrics")
    async def expose() -> Response:
        text = generate_latest(registry)
        return Response(text, headers={"content-type": CONTENT_TYPE_PLAIN_0_0_4})

    return router
