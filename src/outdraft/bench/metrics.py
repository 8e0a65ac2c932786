"""From the samples of a load test to its numbers, with vLLM's names and formulas. Pure functions.

Every latency counts from when the request was due. In a test at a given rate that is the scheduled
arrival, however late the client came to send it: counting from the sending would omit just the
requests that a stalled server held up (coordinated omission).
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from outdraft.engine.stats import StatsTotal

BUNCHED_S = 0.0005  # no step of an engine is that short: such chunks were held up together
METRICS = ("ttft", "tpot", "itl", "e2el", "client_queue_time")


@dataclass(slots=True)
class RequestSample:
    """One request, in seconds since the start of the test."""

    due_s: float  # when it was to be sent
    sent_s: float | None = None  # None if it never was
    # of the chunks that brought text
    chunk_times_s: list[float] = field(default_factory=list[float])
    ended_s: float | None = None  # of the last chunk that brought a choice, or of the failure
    # prompt_tokens, completion_tokens: from the response's usage, None without
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None  # None if it was answered to its end

    @property
    def ttft_s(self) -> float | None:
        """Time to the first text."""
        return self.chunk_times_s[0] - self.due_s if self.chunk_times_s else None

    @property
    def e2el_s(self) -> float | None:
        """Time to the end."""
        return None if self.ended_s is None else self.ended_s - self.due_s

    @property
    def client_queue_time_s(self) -> float | None:
        """From when it was due until it was sent."""
        return None if self.sent_s is None else self.sent_s - self.due_s

    @property
    def num_output_tokens(self) -> int:
        """Tokens, or without usage chunks, which may hold several tokens each."""
        if self.completion_tokens is None:
            return len(self.chunk_times_s)
        return self.completion_tokens

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first."""
        if self.num_output_tokens < 2 or self.ttft_s is None or self.e2el_s is None:
            return None
        return (self.e2el_s - self.ttft_s) / (self.num_output_tokens - 1)

    @property
    def itls_s(self) -> list[float]:
        """Times between chunks with text."""
        return np.diff(self.chunk_times_s).tolist()


def parse_spec_counters(exposition: str) -> StatsTotal | None:
    """A server's counters of speculation in Prometheus' text format, summed over engines; None if
    there are none."""
    sums, accepted_at = defaultdict[str, float](float), Counter[int]()
    try:
        families = list(text_string_to_metric_families(exposition))
    except ValueError:  # it is something else
        return None
    for sample in chain.from_iterable(family.samples for family in families):
        prefix, _, name = sample.name.removesuffix("_total").partition(":spec_decode_")
        if prefix not in ("outdraft", "vllm", "llamacpp"):
            continue
        if name == "num_accepted_tokens_per_pos":  # others have positions by source
            accepted_at[int(sample.labels["position"])] += int(sample.value)
        else:
            sums[name] += sample.value  # of gauges also, which may be no number
    if "num_drafts" not in sums:
        return None
    return StatsTotal(
        num_drafts=int(sums["num_drafts"]),
        num_draft_tokens=int(sums["num_draft_tokens"]),
        num_accepted_tokens=int(sums["num_accepted_tokens"]),
        accepted_at=accepted_at,
    )


def counted_between(before: StatsTotal | None, after: StatsTotal | None) -> StatsTotal | None:
    """Subtract two readings of a server's counters; None without one of them."""
    if before is None or after is None:
        return None
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens", "accepted_at")
    return StatsTotal(**{name: getattr(after, name) - getattr(before, name) for name in names})


def acceptance_report(counters: StatsTotal) -> dict[str, Any]:
    """vLLM's fields; a position's rate is per draft, whether or not the draft reached it.

    The positions end with the last that any draft was accepted at.
    """
    drafts, drafted = counters.num_drafts, counters.num_draft_tokens
    accepted = counters.num_accepted_tokens
    last = max((at for at, count in counters.accepted_at.items() if count), default=-1)
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else None,
        "spec_decode_acceptance_length": 1 + accepted / drafts if drafts else None,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [
            counters.accepted_at[at] / drafts if drafts else 0.0 for at in range(last + 1)
        ],
    }


def load_report(
    samples: Sequence[RequestSample],
    duration_s: float,
    metrics: Sequence[str],
    percentiles: Sequence[float],
) -> dict[str, Any]:
    """Counts, throughput and latencies; a latency that no request has is None.

    Failed requests are counted, by what went wrong, and add nothing to the other numbers.
    """
    good = [sample for sample in samples if sample.error is None]
    total_input = sum(sample.prompt_tokens or 0 for sample in good)
    total_output = sum(sample.num_output_tokens for sample in good)
    num_chunks = sum(len(sample.chunk_times_s) for sample in good)
    failures = Counter(sample.error for sample in samples if sample.error is not None)
    result: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(samples) - len(good),
        "failures": dict(failures.most_common()),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "num_missing_usage": sum(sample.completion_tokens is None for sample in good),
        "request_throughput": per_second(len(good), duration_s),
        "output_throughput": per_second(total_output, duration_s),
        "total_token_throughput": per_second(total_input + total_output, duration_s),
        "max_concurrent_requests": most_at_once(samples),
        "num_chunks": num_chunks,
        "num_bunched_chunks": sum(gap < BUNCHED_S for one in good for gap in one.itls_s),
        "tokens_per_chunk": total_output / num_chunks if num_chunks else None,
    }
    for name in metrics:
        if name == "itl":
            values = [gap for sample in good for gap in sample.itls_s]
        else:
            values = [getattr(sample, f"{name}_s") for sample in good]
        known = [value for value in values if value is not None]
        result |= describe(name, known, percentiles)
    return result


def describe(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> dict[str, Any]:
    """mean_, median_, std_ and pNN_ of some times, in milliseconds; None without any.

    The deviation is that of the population, percentiles are interpolated: numpy's defaults.
    """
    values_ms = np.array(values_s) * 1e3
    words = ("mean", "median", "std", *(f"p{percentile:g}" for percentile in percentiles))
    numbers: list[Any] = [None] * len(words)
    if len(values_ms):
        numbers = [float(one(values_ms)) for one in (np.mean, np.median, np.std)]
        numbers += np.percentile(values_ms, percentiles).tolist()
    return {f"{word}_{name}_ms": number for word, number in zip(words, numbers, strict=True)}


def most_at_once(samples: Sequence[RequestSample]) -> int:
    """The most requests that were under way at one time; one that ends makes room for the next."""
    events = [
        event
        for sample in samples
        if sample.sent_s is not None and sample.ended_s is not None
        for event in ((sample.sent_s, 1), (sample.ended_s, -1))
    ]
    return max(accumulate((change for _, change in sorted(events)), initial=0))


def detailed_report(samples: Sequence[RequestSample]) -> dict[str, list[Any]]:
    """The raw samples, one entry per request, in order; times in seconds."""
    return {
        "input_lens": [sample.prompt_tokens for sample in samples],
        "output_lens": [sample.num_output_tokens for sample in samples],
        "due_times": [sample.due_s for sample in samples],
        "start_times": [sample.sent_s for sample in samples],
        "ttfts": [sample.ttft_s for sample in samples],
        "itls": [sample.itls_s for sample in samples],
        "latencies": [sample.e2el_s for sample in samples],
        "generated_texts": [sample.text for sample in samples],
        "finish_reasons": [sample.finish_reason for sample in samples],
        "errors": [sample.error for sample in samples],
    }


def per_second(count: int, duration_s: float) -> float:
    """A rate; 0 where nothing was given any time."""
    return count / duration_s if duration_s else 0.0
