"""Metrics of what the controller decided: why, at what price, and how right it was."""

import math
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outdraft.core.decided import AlarmKind
from outdraft.core.plan import StepStats
from outdraft.drafting.explained import REASONS
from outdraft.server.messages import EngineInfo

PARTS = ("draft", "target", "host")
DRAFTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 48, 63)  # buckets of lengths

_GAUGES = {
    "spec_decode_is_drafting": (
        "1 if the newest step with something to decide granted drafts, else 0. NaN before one."
    ),
    "spec_decode_price": (
        "Accepted tokens that a drafted row had to promise in the newest step with a price. NaN "
        "before one, and while lengths are fixed."
    ),
    "spec_decode_predicted_gain": (
        "Tokens per second against plain decoding, minus 1, as predicted for the newest step with "
        "a prediction. NaN before one."
    ),
}
_COUNTERS = {
    "spec_decode_steps": (
        ("reason",),
        "Steps with something to decide, by the reason for drafting, or for not drafting.",
    ),
    "predicted_step_seconds": (
        ("part",),
        "Predicted seconds of the engine's steps, of those with a prediction: draft, target "
        "(verify and sample), host.",
    ),
    "measured_step_seconds": (("part",), "What the same steps took."),
    "spec_decode_drafts_per_pos": (
        ("source", "position"),
        "Drafts that reached this position (depth, from 0), by source.",
    ),
    "spec_decode_accepted_drafts_per_pos": (
        ("source", "position"),
        "Drafts that were accepted down to this position, by source. Divided by "
        "spec_decode_drafts_per_pos_total it is the acceptance curve.",
    ),
    "spec_decode_alarms": (("alarm", "source"), "Alarms that began."),
}


class DecisionMetrics:
    """A part of the server's registry."""

    def __init__(self, info: EngineInfo, model_name: str, registry: CollectorRegistry) -> None:
        self._model_name = model_name
        own, prefix = ["model_name"], "outdraft:"
        self._gauges = {
            name: Gauge(prefix + name, text, own, registry=registry).labels(model_name)
            for name, text in _GAUGES.items()
        }
        self._counters = {
            name: Counter(prefix + name, text, [*own, *labels], registry=registry)
            for name, (labels, text) in _COUNTERS.items()
        }
        self._active = Gauge(
            prefix + "spec_decode_alarm_active",
            "1 while the alarm lasts, else 0.",
            [*own, "alarm", "source"],
            registry=registry,
        )
        self._granted = Histogram(
            prefix + "granted_draft_length",
            "Tokens that a request was granted before the step was planned, per request and step "
            "that samples; 0: none.",
            own,
            registry=registry,
            buckets=DRAFTS,
        ).labels(model_name)
        for gauge in self._gauges.values():
            gauge.set(math.nan)
        self._show_zeros(info)

    def observe(self, step: StepStats) -> None:
        """Count a step."""
        for length in step.granted_lengths:
            self._granted.observe(length)
        for source, levels, accepted in step.draft_levels:
            for position in range(levels):
                is_kept = int(position < accepted)
                self._add("spec_decode_drafts_per_pos", 1, source, position)
                self._add("spec_decode_accepted_drafts_per_pos", is_kept, source, position)
        for alarm in step.alarms:
            self._add("spec_decode_alarms", int(alarm.is_on), alarm.kind, alarm.source)
            self._active.labels(self._model_name, alarm.kind, alarm.source).set(int(alarm.is_on))
        if step.decision is not None:
            self._observe_decision(step)

    def _observe_decision(self, step: StepStats) -> None:
        decision, times = step.decision, step.times
        assert decision is not None
        self._add("spec_decode_steps", 1, decision.reason)
        self._gauges["spec_decode_is_drafting"].set(int(any(step.granted_lengths)))
        if decision.price is not None:
            self._gauges["spec_decode_price"].set(decision.price)
        expected = decision.prediction
        if expected is None:
            return
        self._gauges["spec_decode_predicted_gain"].set(expected.gain)
        predicted = (expected.draft_s, expected.target_s, expected.host_s)
        measured = (times.draft_s, times.verify_s + times.sample_s, step.host_s)
        for part, predicted_s, measured_s in zip(PARTS, predicted, measured, strict=True):
            self._add("predicted_step_seconds", predicted_s, part)
            self._add("measured_step_seconds", measured_s, part)

    def _show_zeros(self, info: EngineInfo) -> None:
        """What can happen is there before it does."""
        known: dict[str, Sequence[object]] = {
            "reason": REASONS,
            "part": PARTS,
            "source": info.speculation_methods,
            "position": range(info.num_speculative_tokens),
            "alarm": list(AlarmKind),
        }
        for name, (labels, _) in _COUNTERS.items():
            first, *rest = (known[label] for label in labels)
            for one in first:
                for values in [(one, other) for other in rest[0]] if rest else [(one,)]:
                    self._add(name, 0, *values)
        for kind in AlarmKind:
            for source in info.speculation_methods:
                self._active.labels(self._model_name, kind, source).set(0)

    def _add(self, name: str, count: float, *labels: object) -> None:
        self._counters[name].labels(self._model_name, *map(str, labels)).inc(count)
