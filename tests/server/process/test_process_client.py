"""An engine in another process answers as an engine in this one, and its end is noticed."""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outdraft.core.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    GenerationError,
    RequestError,
)
from outdraft.core.outputs import RequestOutput
from outdraft.core.process import ending
from outdraft.core.sampling import SamplingParams
from outdraft.server.client import EngineProcess
from outdraft.server.messages import Steps
from outdraft.server.process_client import Supervisor
from tests.cli.pair import pair
from tests.server.process.engines import (
    PROMPTS,
    complete,
    config,
    offline,
    processes,
    stream,
    supervisor,
)

pytestmark = pytest.mark.slow


@dataclass
class Served:
    """An engine process, and the event loop that its client lives in."""

    runner: asyncio.Runner
    client: Supervisor
    news: list[Steps]

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(coroutine)

    async def idle(self) -> Steps:
        """The statistics of an engine that has nothing left to do."""
        while not self.news or self.news[-1].num_running or self.news[-1].num_waiting:
            await asyncio.sleep(0.01)
        return self.news[-1]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    client, news = supervisor(config()), []

    async def start() -> asyncio.Task[None]:
        await client.start()
        client.watchers.append(news.append)
        return asyncio.create_task(client.run())

    async def stop(running: asyncio.Task[None]) -> None:
        client.close("the tests are over")
        await running

    with asyncio.Runner() as runner:
        running = runner.run(start())
        yield Served(runner, client, news)
        runner.run(stop(running))


@asynccontextmanager
async def started(client: Supervisor) -> AsyncIterator[Supervisor]:
    await client.start()
    running = asyncio.create_task(client.run())
    try:
        yield client
    finally:
        client.close("the test is over")
        await asyncio.gather(running, return_exceptions=True)


def test_prompts_of_different_salts_share_no_blocks_in_the_other_process(served: Served):
    async def num_cached(salt: str | None) -> int:
        encoded = served.client.inputs.encoded([7, 8, 9, 10] * 20)
        salted = replace(encoded, cache_salt=salt)
        params = SamplingParams(max_tokens=2, temperature=0)
        updates = [u async for u in served.client.generate("salted", salted, params)]
        return updates[-1].output.num_cached_tokens

    salts = (None, "a", "b")
    assert [served.run(num_cached(salt)) for salt in salts] == [0, 0, 0]
    assert [served.run(num_cached(salt)) for salt in salts] == [64, 64, 64]


def same_text(got: RequestOutput, want: RequestOutput) -> bool:
    """Whatever was drafted, and in whatever batch."""
    return got.prompt_token_ids == want.prompt_token_ids and all(
        (a.text, a.token_ids, a.finish_reason, a.stop_reason)
        == (b.text, b.token_ids, b.finish_reason, b.stop_reason)
        for a, b in zip(got.outputs, want.outputs, strict=True)
    )


CASES = {
    "greedy": SamplingParams(temperature=0, max_tokens=40),
    "sampled": SamplingParams(seed=3, max_tokens=40, top_p=0.9),
    "several": SamplingParams(seed=4, max_tokens=40, n=3),
    "stopped": SamplingParams(temperature=0, max_tokens=60, stop=[",", "\n"], n=2),
    "bad words": SamplingParams(seed=4, max_tokens=20, bad_words=["left"], prediction="return"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_stream_ends_with_the_offline_result(served: Served, case: str):
    [want] = complete([PROMPTS[0]], [CASES[case]])
    updates = served.run(stream(served.client, "0", PROMPTS[0], CASES[case]))
    got = updates[-1].output
    assert got.finished
    assert got.request_id == "0"
    assert same_text(got, want)
    for completion in got.outputs:
        deltas = [d for u in updates for d in u.deltas if d.index == completion.index]
        assert "".join(delta.text for delta in deltas) == completion.text


def test_log_probabilities_are_the_offline_ones(served: Served):
    params = SamplingParams(temperature=0, max_tokens=20, logprobs=3, prompt_logprobs=1)
    [want] = complete([PROMPTS[0]], [params])
    got = served.run(stream(served.client, "0", PROMPTS[0], params))[-1].output
    for ours, theirs in [
        (got.outputs[0].logprobs, want.outputs[0].logprobs),
        (got.prompt_logprobs[1:], want.prompt_logprobs[1:]),
    ]:
        for row, other in zip(ours, theirs, strict=True):
            assert list(row) == list(other)
            for token_id, entry in row.items():
                assert (entry.rank, entry.decoded_token) == (
                    other[token_id].rank,
                    other[token_id].decoded_token,
                )
                assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


def test_64_streams_at_once_each_end_with_their_offline_result(served: Served):
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(64)]
    params = [SamplingParams(seed=i, temperature=i % 3 / 2, max_tokens=30) for i in range(64)]
    want = complete(prompts, params)

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(
            *(
                stream(served.client, str(i), prompt, one)
                for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
            )
        )

    for updates, expected in zip(served.run(all_at_once()), want, strict=True):
        assert same_text(updates[-1].output, expected)
    assert served.client.num_unfinished == 0


def test_leaving_a_stream_gives_all_blocks_back_and_ends_its_work(served: Served):
    async def leave() -> tuple[int, Steps]:
        served.news.clear()
        encoded = served.client.inputs.encoded(PROMPTS[0])
        params = SamplingParams(seed=1, max_tokens=180, ignore_eos=True, n=64)
        updates = served.client.generate("0", encoded, params)
        async for update in updates:
            num_tokens = sum(len(c.token_ids) for c in update.output.outputs)
            break
        await updates.aclose()
        return num_tokens, await served.idle()

    num_seen, last = served.run(leave())
    num_emitted = sum(step.num_emitted for news in served.news for step in news.steps)
    assert last.kv_usage == 0.0
    assert num_emitted < num_seen + 6_000, "of 11,520 tokens"
    assert served.client.num_unfinished == 0


def test_a_slow_reader_finds_everything_in_one_update(served: Served):
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)

    async def read_slowly() -> list[int]:
        encoded = served.client.inputs.encoded(PROMPTS[1])
        lengths = []
        async for update in served.client.generate("0", encoded, params):
            lengths.append(sum(len(delta.token_ids) for delta in update.deltas))
            if len(lengths) == 1:
                served.news.clear()
                await served.idle()
        return lengths

    lengths = served.run(asyncio.wait_for(read_slowly(), 20))
    assert len(lengths) == 2
    assert sum(lengths) == 50


def test_a_request_without_finite_logits_fails_by_itself(tmp_path: Path):
    """One token's embedding is NaN; the second prompt has that token."""
    path = shutil.copytree(pair().target, tmp_path / "target")
    weights = load_file(path / "model.safetensors")
    token_id = offline().models.tokenizer.encode("subtract").ids[0]
    weights["model.embed_tokens.weight"][token_id] = torch.nan
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(temperature=0, max_tokens=1, n=2)

    async def both() -> tuple[Any, Any, Any]:
        client = supervisor(replace(config(), model=str(path)))
        async with started(client):
            good, bad = await asyncio.gather(
                *(stream(client, text, text, params) for text in ("left", "subtract")),
                return_exceptions=True,
            )
            return good, bad, await stream(client, "again", "left", params)

    good, bad, again = asyncio.run(both())
    assert isinstance(bad, GenerationError)
    assert "no finite logits for token 1 of the output" in str(bad)
    for updates in (good, again):
        assert [one.finish_reason for one in updates[-1].output.outputs] == ["length"] * 2


def test_requests_that_cannot_run_are_refused_by_name(served: Served):
    async def refused(params: SamplingParams) -> str:
        with pytest.raises(RequestError) as caught:
            await stream(served.client, "0", PROMPTS[0], params)
        return caught.value.field

    assert served.run(refused(SamplingParams(stop_token_ids=[100_000]))) == "stop_token_ids"
    unknown = SamplingParams(speculation={"method": "oracle"})
    assert served.run(refused(unknown)) == "speculation"
    assert served.client.num_unfinished == 0


def test_a_request_that_cannot_be_sent_is_not_waited_for(served: Served):
    async def main() -> None:
        prompt = served.client.inputs.encoded(PROMPTS[0])
        with pytest.raises(OverflowError):  # messages hold whole numbers of 64 bits
            await anext(served.client.generate("0", prompt, SamplingParams(), priority=1 << 70))
        assert served.client.num_unfinished == 0
        await stream(served.client, "0", PROMPTS[0], SamplingParams())

    served.run(main())


def test_a_full_queue_is_a_capacity_error_and_a_trace_has_times():
    async def main() -> None:
        async with started(supervisor(config(max_waiting=1))) as client:
            many = [stream(client, str(i), PROMPTS[0], SamplingParams()) for i in range(150)]
            results = await asyncio.gather(*many, return_exceptions=True)
            assert {type(r) for r in results} == {list, CapacityError}
            params = replace(SamplingParams(), speculation={"trace": True})
            updates = await stream(client, "0", PROMPTS[0], params)
            steps = [step for u in updates for d in u.deltas for step in d.trace or ()]
            assert sum(step.num_emitted for step in steps) == 16
            assert all(step.seconds > 0 for step in steps)

    asyncio.run(main())


def test_readers_learn_within_a_second_that_the_engine_was_killed():
    before = set(processes(os.getpid()))

    async def main() -> None:
        async with started(supervisor(config())) as client:
            params = SamplingParams(max_tokens=180, ignore_eos=True, n=16)
            [pid] = set(processes(os.getpid())) - before
            reader = client.generate("0", client.inputs.encoded(PROMPTS[0]), params)
            await anext(reader)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="ended by SIGKILL"):
                async for _ in reader:
                    pass
            assert not client.is_alive
            assert "ended by SIGKILL" in (client.ended_by or "")
            with pytest.raises(EngineDeadError, match="ended by SIGKILL"):
                await stream(client, "1", PROMPTS[0], params)

    asyncio.run(main())


def test_a_restarted_engine_answers_through_the_same_client():
    params = SamplingParams(temperature=0, max_tokens=20)
    [want] = complete([PROMPTS[0]], [params])

    before = set(processes(os.getpid()))

    async def main() -> None:
        async with started(supervisor(config(), restarts=True)) as client:
            news: list[Steps] = []
            client.watchers.append(news.append)
            [pid] = set(processes(os.getpid())) - before
            os.kill(pid, signal.SIGKILL)
            while client.is_alive:
                await asyncio.sleep(0.01)
            while not client.is_alive:
                await asyncio.sleep(0.05)
            updates = await stream(client, "0", PROMPTS[0], params)
            assert same_text(updates[-1].output, want)
            assert news

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_engine_that_is_killed_while_it_starts_says_by_what():
    chosen, before = config(), set(processes(os.getpid()))

    async def main() -> None:
        process = EngineProcess(chosen, {**os.environ}, "WARNING")
        [pid] = set(processes(os.getpid())) - before
        os.kill(pid, signal.SIGKILL)
        try:
            with pytest.raises(EngineDeadError, match=r"while it started: .* SIGKILL"):
                await process.started(lambda loading: None)
        finally:
            process.end()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, "exit code 3"),
        (0, "exit code 0"),
        (-signal.SIGSEGV, "ended by SIGSEGV"),
        (-signal.SIGKILL, "ended by SIGKILL, as the kernel does when memory runs out"),
        (-63, "ended by signal 63"),
    ],
)
def test_an_end_is_a_signal_by_name_or_an_exit_code(code: int, words: str):
    assert ending(code) == f"its process {'was ' if code < 0 else 'ended with '}{words}"


@pytest.mark.parametrize(
    ("option", "value"), [("max_model_len", 100_000), ("num_blocks", 2**50), ("model", "/nowhere")]
)
def test_a_wrong_configuration_is_reported_as_one(option: str, value: Any):
    client, before = supervisor(replace_option(option, value)), processes(os.getpid())

    async def main() -> None:
        with pytest.raises(ConfigError, match=option):
            await client.start()
        assert not client.is_alive
        assert processes(os.getpid()) == before

    asyncio.run(main())


def replace_option(option: str, value: Any):
    return replace(config(), model=value) if option == "model" else config(**{option: value})
