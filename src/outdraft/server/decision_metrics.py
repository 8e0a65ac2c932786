"""Metrics of what the controller decided: why, at what price, and how right it was."""

from collections.abc import Sequence

from outdraft.core.decision import AlarmKind, Reason
from outdraft.core.plan import StepStats
from outdraft.server.series import Series, Table

PARTS = ("draft", "target", "host")
# Values of labels.
KNOWN: dict[str, Sequence[object]] = {
    "reason": tuple(Reason),
    "part": PARTS,
    "alarm": tuple(AlarmKind),
}

GAUGES: Table = {
    "spec_decode_is_drafting": (
        (),
        "1 if the newest step with something to decide granted drafts, else 0. NaN before one.",
    ),
    "spec_decode_price": (
        (),
        "Accepted tokens that a drafted row had to promise in the newest step with a price. NaN "
        "before one, and while lengths are fixed.",
    ),
    "spec_decode_predicted_gain": (
        (),
        "Tokens per second against plain decoding, minus 1, as predicted for the newest step with "
        "a prediction. NaN before one.",
    ),
    "spec_decode_alarm_active": (("alarm", "source"), "1 while the alarm lasts, else 0."),
}
COUNTERS: Table = {
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


def observe_decisions(series: Series, step: StepStats) -> None:
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
    for part, predicted_s, measured_s in zip(PARTS, predicted, measured, strict=True):
        series.add("predicted_step_seconds", predicted_s, part)
        series.add("measured_step_seconds", measured_s, part)
