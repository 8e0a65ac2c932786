"""Steps and reports written by hand, a client that reads them, and a reader of the exposition."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import msgspec
import numpy as np
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outdraft.core.draft import DraftSource
from outdraft.core.outputs import (
    CompletionOutput,
    RequestDelta,
    RequestMetrics,
    RequestOutput,
    SequenceDelta,
    SpeculationMetrics,
    TargetChoice,
)
from outdraft.core.plan import PhaseTimes, StepStats
from outdraft.engine.inputs import EncodedPrompt
from outdraft.server.client import EngineLink, OnLoading
from outdraft.server.messages import Add, Command, EngineInfo, Progress, Report, Steps
from outdraft.server.metrics import Metrics
from outdraft.server.process_client import Supervisor
from tests.server.api.fake_engine import fake_inputs

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
    """A request that arrives at 10 s and is told what happens to it; all of it is counted."""

    def __init__(self, counted: Metrics, num_sequences: int = 1, num_cached: int = 0) -> None:
        self._counted = counted
        self._output = RequestOutput(
            "r",
            "the secret prompt",
            PROMPT.token_ids.tolist(),
            [CompletionOutput(index) for index in range(num_sequences)],
            finished=False,
            metrics=RequestMetrics(10.0, SpeculationMetrics(3)),
            num_cached_tokens=num_cached,
        )

    def gain(
        self,
        now_s: float,
        counts: tuple[int, ...],
        reasons: tuple[str | None, ...] = (None,),
        preemptions: int = 0,
    ) -> None:
        """A number of tokens for each sequence, and how it ended if it did."""
        output, times = self._output, self._output.metrics
        before = times.last_token_s, times.num_preemptions
        times.first_scheduled_s = times.first_scheduled_s or 10.5
        times.num_preemptions = preemptions
        if any(counts):
            times.first_token_s = times.first_token_s or now_s
            times.last_token_s = now_s
        gained = [
            CompletionOutput(i, " hidden answer" * n, [5] * n, finish_reason=reason)
            for i, (n, reason) in enumerate(zip(counts, reasons, strict=True))
        ]
        for one, delta in zip(output.outputs, gained, strict=True):
            if one.finish_reason is None:
                one.extend(delta)
        output.finished = all(one.finish_reason is not None for one in output.outputs)
        if output.finished:
            times.finished_s = now_s
        self._counted.observe_request(output, gained, *before)


class ScriptedLink(EngineLink):
    """The way to an engine that does what a test says."""

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.reports: asyncio.Queue[list[Report]] = asyncio.Queue()
        self.has_died = asyncio.Event()

    async def started(self, on_loading: OnLoading) -> EngineInfo:
        return INFO

    async def receive_frame(self) -> bytes:
        return msgspec.msgpack.encode(await self.reports.get())

    def send_frame(self, command: bytes) -> None:
        self.commands.append(msgspec.msgpack.decode(command, type=Command))

    async def death(self) -> str:
        await self.has_died.wait()
        return "it was meant to"

    def end(self) -> None:
        self.has_died.set()

    @property
    def request_id(self) -> str:
        """The newest request as the wire has it."""
        return [command for command in self.commands if isinstance(command, Add)][-1].request_id

    def gain(self, counts: tuple[int, ...], reasons: tuple[str | None, ...]) -> None:
        """Report a number of tokens for each sequence of the newest request, and its end."""
        parts = tuple(
            SequenceDelta(
                i,
                (5,) * n,
                (TargetChoice.PLAIN,) * n,
                finish_reason=reason,
                error="it failed" if reason == "error" else None,
            )
            for i, (n, reason) in enumerate(zip(counts, reasons, strict=True))
            if n or reason is not None
        )
        delta = RequestDelta(self.request_id, parts, 0.0, 0, 0, 3, lossless=True)
        self.reports.put_nowait([Progress([delta])])


@asynccontextmanager
async def supervised(counted: Metrics) -> AsyncGenerator[tuple[Supervisor, ScriptedLink]]:
    """A client of such an engine, whose requests are counted."""
    link = ScriptedLink()
    client = Supervisor(
        lambda: link, lambda _: None, restarts=False, input_processor=lambda _: fake_inputs()
    )
    await client.start()
    client.observe(counted)
    running = asyncio.create_task(client.run())
    try:
        yield client, link
    finally:
        client.close("the test is over")
        await asyncio.gather(running, return_exceptions=True)


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
