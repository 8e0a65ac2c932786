"""Steps and updates written by hand, a client that replays them, and a reader of the exposition."""

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field

import numpy as np
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outdraft.core.draft import DraftSource
from outdraft.core.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
)
from outdraft.core.plan import PhaseTimes, StepStats
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt
from outdraft.server.client import Update
from outdraft.server.messages import EngineInfo, Steps
from outdraft.server.metrics import Metrics

INFO = EngineInfo(
    model_path="/nowhere",
    dtype="float32",
    device="cpu",
    vocab_size=64,
    max_model_len=100,
    eos_token_ids=[0],
    speculation_methods=["prediction", "suffix", "draft_model"],
    num_speculative_tokens=3,
    memory="",
)
PROMPT = EncodedPrompt("the secret prompt", np.array([7, 8, 9, 10], dtype=np.int32))


def step(
    draft_lengths: tuple[int, ...],
    accepted: tuple[int, ...] | None = None,
    *,
    source: DraftSource = DraftSource.SUFFIX,
    prefill_rows: int = 0,
    draft_s: float = 0.0,
    verify_s: float = 1.0,
    sample_s: float = 0.0,
    host_s: float = 0.0,
) -> StepStats:
    """A step of chains: drafted and accepted tokens of each request that sampled."""
    accepted = accepted or (0,) * len(draft_lengths)
    drafted, taken = sum(draft_lengths), sum(accepted)
    num_drafts = sum(length > 0 for length in draft_lengths)
    return StepStats(
        num_requests=len(draft_lengths) + bool(prefill_rows),
        num_waiting=0,
        num_rows=len(draft_lengths) + drafted + prefill_rows,
        num_emitted=len(draft_lengths) + taken,
        num_drafts=num_drafts,
        num_draft_tokens=drafted,
        num_accepted_tokens=taken,
        accepted_at=tuple(sum(a > i for a in accepted) for i in range(max(accepted, default=0))),
        drafted_by_source={source: drafted} if drafted else {},
        accepted_by_source={source: taken} if drafted else {},
        drafts_by_source={source: num_drafts} if drafted else {},
        kv_usage=0.0,
        times=PhaseTimes(draft_s, verify_s, sample_s),
        host_s=host_s,
        draft_lengths=draft_lengths,
    )


def report(*steps: StepStats, running: int = 0, waiting: int = 0, kv_usage: float = 0.0) -> Steps:
    return Steps(list(steps), running, waiting, kv_usage)


class Script:
    """A request that arrives at 10 s and is told what happens to it, one update at a time."""

    def __init__(self, num_sequences: int = 1, num_cached: int = 0) -> None:
        self.output = RequestOutput(
            "r",
            "the secret prompt",
            PROMPT.token_ids.tolist(),
            [CompletionOutput(index) for index in range(num_sequences)],
            finished=False,
            metrics=RequestMetrics(10.0, SpeculationMetrics(3)),
            num_cached_tokens=num_cached,
        )

    def update(
        self,
        now_s: float,
        counts: tuple[int, ...],
        reasons: tuple[str | None, ...] = (None,),
        preemptions: int = 0,
    ) -> Update:
        """So many tokens for each sequence, and how it ended if it did."""
        output, times = self.output, self.output.metrics
        times.first_scheduled_s = times.first_scheduled_s or 10.5
        times.num_preemptions = preemptions
        if any(counts):
            times.first_token_s = times.first_token_s or now_s
            times.last_token_s = now_s
        for one, count, reason in zip(output.outputs, counts, reasons, strict=True):
            one.token_ids.extend([5] * count)
            one.text += " hidden answer" * count
            one.finish_reason = reason or one.finish_reason
        output.finished = all(one.finish_reason is not None for one in output.outputs)
        if output.finished:
            times.finished_s = now_s
        deltas = [
            CompletionOutput(i, " hidden answer" * n, [5] * n, finish_reason=reason)
            for i, (n, reason) in enumerate(zip(counts, reasons, strict=True))
        ]
        return Update(output, deltas)


@dataclass
class ScriptedClient:
    """Replays a script, and has it counted; an exception in it is raised."""

    script: Callable[[], list[Callable[[], Update] | Exception]]
    counted: Metrics
    closed: list[str] = field(default_factory=list)

    def generate(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams
    ) -> AsyncGenerator[Update]:
        return self.counted.observed(self.replayed(request_id), params.n)

    async def replayed(self, request_id: str) -> AsyncGenerator[Update]:
        try:
            for entry in self.script():
                if isinstance(entry, Exception):
                    raise entry
                yield entry()
        finally:
            self.closed.append(request_id)


class Exposed:
    """The numbers of a registry, as a scraper reads them."""

    def __init__(self, metrics: Metrics) -> None:
        text = generate_latest(metrics.registry).decode()
        self.families = list(text_string_to_metric_families(text))
        self.samples = [
            sample
            for family in self.families
            for sample in family.samples
            if not sample.name.endswith("_created")
        ]

    def value(self, name: str, **labels: str) -> float:
        """The one sample with this name (without the prefix) and these labels beside the model."""
        want = {"model_name": "served", **labels}
        found = [s.value for s in self.samples if s.name == f"outdraft:{name}" and s.labels == want]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def histogram(self, name: str) -> tuple[float, float]:
        """Count and sum."""
        return self.value(f"{name}_count"), self.value(f"{name}_sum")


def metrics() -> Metrics:
    return Metrics(INFO, "served")
