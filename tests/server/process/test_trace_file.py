"""A trace of requests as a server writes it: whole lines, of every request that ends."""

import asyncio
import logging
import resource
import signal
from pathlib import Path

import pytest

from outdraft.config.speculation import SpeculationConfig
from outdraft.core.errors import ConfigError, RequestError
from outdraft.core.recorded import RecordedOutput, RecordedRequest, RecordedStep, read_requests
from outdraft.core.sampling import SamplingParams
from outdraft.server.trace_file import TraceFile
from tests.server.process.engines import PROMPTS, config, stream, supervisor


def request(arrival_s: float, num_prompt: int = 3) -> RecordedRequest:
    return RecordedRequest(
        format=1,
        arrival_s=arrival_s,
        elapsed_s=1,
        prompt_token_ids=[7] * num_prompt,
        max_tokens=4,
        temperature=0,
        rule="greedy",
        outputs=[RecordedOutput([1, 2], "stop", [RecordedStep(2)])],
    )


def test_lines_are_read_as_they_were_written_and_by_nobody_else(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    with TraceFile(path, SpeculationConfig()) as trace:
        for arrival_s in (0.0, 1.0):
            trace.write(request(arrival_s))
    assert read_requests(path) == ([request(0.0), request(1.0)], True)
    assert path.stat().st_mode & 0o777 == 0o600


def test_no_file_is_overwritten(tmp_path: Path):
    path = tmp_path / "trace.jsonl"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists already"):
        TraceFile(path, SpeculationConfig())
    assert path.read_text() == "mine"


def test_a_file_that_cannot_be_made_is_told_at_once(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"--record-trace.*No such file"):
        TraceFile(tmp_path / "none" / "trace.jsonl", SpeculationConfig())


def test_a_full_disk_ends_the_recording_and_leaves_whole_lines(tmp_path: Path, caplog):
    """The system takes a part of a line, then refuses the rest."""
    path = tmp_path / "trace.jsonl"
    with TraceFile(path, SpeculationConfig()) as trace:
        trace.write(request(0.0))
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 50, before[1]))
            with caplog.at_level(logging.ERROR):
                trace.write(request(1.0, num_prompt=1000))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            signal.signal(signal.SIGXFSZ, ignored)
        trace.write(request(2.0))
    assert read_requests(path) == ([request(0.0)], True)
    assert "ends here" in caplog.text


@pytest.mark.slow
def test_a_server_records_what_its_readers_got(tmp_path: Path):
    """Whole, stopped, several, predicted and aborted requests; one that was refused is left out."""
    chosen = config()
    path = tmp_path / "trace.jsonl"
    cases = {
        "greedy": SamplingParams(temperature=0, max_tokens=40, ignore_eos=True),
        "stopped": SamplingParams(temperature=0, max_tokens=60, stop=[",", "\n"], n=2),
        "seeded": SamplingParams(seed=4, max_tokens=20, n=3, prediction="return left"),
        "plain": SamplingParams(max_tokens=12, ignore_eos=True, speculation={"enabled": False}),
    }

    async def main() -> tuple[list, list[int]]:
        client = supervisor(chosen)
        with TraceFile(path, chosen.speculation) as trace:
            client.record(trace)
            await client.start()
            running = asyncio.create_task(client.run())
            finished = [
                (await stream(client, name, PROMPTS[0], params))[-1].output
                for name, params in cases.items()
            ]
            endless = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
            updates = client.generate("left", client.inputs.encoded(PROMPTS[1]), endless)
            async for update in updates:
                if len(update.output.outputs[0].token_ids) > 3:
                    break
            await updates.aclose()
            left = update.output.outputs[0].token_ids
            with pytest.raises(RequestError):
                await stream(client, "no", PROMPTS[0], SamplingParams(stop_token_ids=[100_000]))
            client.close("the test is over")
            await running
        return finished, left

    finished, left = asyncio.run(main())
    recorded, is_whole = read_requests(path)
    assert is_whole
    assert len(recorded) == len(cases) + 1
    for line, output in zip(recorded, finished, strict=False):
        assert line.prompt_token_ids == output.prompt_token_ids
        assert [one.token_ids for one in line.outputs] == [o.token_ids for o in output.outputs]
        assert [one.finish_reason for one in line.outputs] == [
            o.finish_reason for o in output.outputs
        ]
        metrics = output.metrics.speculative_decoding
        steps = [step for one in line.outputs for step in one.steps]
        drafted = sorted(sum(step.drafted.values()) for step in steps if step.drafted)
        assert drafted == sorted(metrics.per_step_drafted)
        assert sum(sum(step.accepted.values()) for step in steps) == (
            metrics.num_accepted_draft_tokens
        )
    greedy, stopped, seeded, plain, aborted = recorded
    assert [one.rule for one in recorded] == [
        "greedy", "greedy", "drafter_invariant", "drafter_invariant", "greedy",
    ]  # fmt: skip
    assert {one.finish_reason for one in stopped.outputs} == {"stop"}
    assert seeded.prediction_token_ids
    assert greedy.prediction_token_ids == []
    assert not plain.may_draft
    assert all(not step.drafted for step in plain.outputs[0].steps)
    assert aborted.outputs[0].finish_reason == "abort"
    assert aborted.outputs[0].token_ids == left
    assert [one.arrival_s for one in recorded] == sorted(one.arrival_s for one in recorded)
    assert b"return" not in path.read_bytes()
