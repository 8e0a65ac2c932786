"""Streams of many tasks over one engine: complete, cancellable, honest about failures."""

import asyncio

import pytest

from outdraft.core.errors import EngineDeadError, RanksError, RequestError
from outdraft.core.outputs import RequestOutput
from outdraft.core.plan import StepPlan
from outdraft.engine.async_engine import AsyncEngine
from tests.oracle.engines import engine, greedy, ids, prompts_of, run

LENGTHS = (3, 21, 40, 9, 33)


async def _last(stream) -> RequestOutput:
    return [output async for output in stream][-1]


def test_streams_end_with_what_offline_generation_answers():
    prompts = prompts_of(LENGTHS)
    want = ids(run(engine("qwen2", "plain"), prompts, greedy(20)))

    async def main() -> list[RequestOutput]:
        async with AsyncEngine(engine("qwen2", "combined").engine) as streams:
            tasks = [_last(streams.generate(str(i), p, greedy(20))) for i, p in enumerate(prompts)]
            return await asyncio.gather(*tasks)

    assert ids(asyncio.run(main())) == want


def test_a_stream_grows_and_its_snapshots_do_not_change():
    async def main() -> list[RequestOutput]:
        async with AsyncEngine(engine("qwen2", "perfect").engine) as streams:
            return [o async for o in streams.generate("0", [5, 6, 7], greedy(15))]

    outputs = asyncio.run(main())
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [1, 5, 9, 13, 15]
    assert [output.finished for output in outputs] == [False] * 4 + [True]


def test_leaving_a_stream_gives_everything_back():
    core = engine("qwen2", "combined").engine

    async def main() -> None:
        async with AsyncEngine(core) as streams:
            async for _ in streams.generate("0", [5, 6, 7], greedy(80)):
                break
            await _last(streams.generate("1", [5, 6], greedy(3)))

    asyncio.run(main())
    assert not core.has_work
    assert core.scheduler.pool.usage == 0


def test_a_refused_request_harms_no_other():
    async def main() -> RequestOutput:
        async with AsyncEngine(engine("qwen2", "ngram").engine) as streams:
            good = asyncio.create_task(_last(streams.generate("0", [5, 6], greedy(10))))
            with pytest.raises(RequestError, match="prompt"):
                await _last(streams.generate("1", [], greedy(10)))
            return await good

    assert asyncio.run(main()).finished


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_failing_step_is_reported_and_a_second_one_ends_the_engine(num_failures: int):
    core = engine("qwen2", "plain").engine
    launch, failures = core.runner.launch, [num_failures]

    def breaking(plan: StepPlan):
        if failures[0]:
            failures[0] -= 1
            raise RuntimeError("the device is on fire")
        return launch(plan)

    core.runner.launch = breaking

    async def main() -> None:
        async with AsyncEngine(core) as streams:
            for number in range(num_failures):
                with pytest.raises(EngineDeadError):
                    await _last(streams.generate(str(number), [5], greedy(4)))
            if num_failures == 1:
                assert (await _last(streams.generate("ok", [5], greedy(4)))).finished
            else:
                with pytest.raises(EngineDeadError):
                    await _last(streams.generate("late", [5], greedy(4)))

    asyncio.run(main())
    assert core.scheduler.pool.usage == 0


def test_a_step_that_loses_a_rank_ends_the_engine_and_readers_are_told_which():
    core = engine("qwen2", "plain").engine

    def losing(plan: StepPlan):
        raise RanksError("rank 1 of 2: its process was ended by SIGKILL")

    core.runner.launch = losing

    async def main() -> None:
        async with AsyncEngine(core) as streams:
            for request_id in ("0", "1"):
                with pytest.raises(EngineDeadError, match="rank 1 of 2: its process was ended"):
                    await _last(streams.generate(request_id, [5, 6], greedy(5)))

    asyncio.run(main())


def test_a_failing_step_ends_only_what_ran_in_it():
    core = engine("qwen2", "plain", max_num_seqs=1).engine
    launch, failures = core.runner.launch, [1]

    def breaking(plan: StepPlan):
        if failures[0]:
            failures[0] = 0
            raise RuntimeError("the device is on fire")
        return launch(plan)

    core.runner.launch = breaking

    async def main() -> RequestOutput:
        async with AsyncEngine(core) as streams:
            first = asyncio.create_task(_last(streams.generate("0", [5], greedy(4))))
            second = asyncio.create_task(_last(streams.generate("1", [6], greedy(4))))
            with pytest.raises(EngineDeadError):
                await first
            return await second

    assert asyncio.run(main()).finished


def test_readers_of_a_stopped_engine_are_told():
    async def main() -> None:
        streams = AsyncEngine(engine("qwen2", "plain").engine)
        streams.start()
        stream = streams.generate("0", [5], greedy(90))
        await anext(stream)
        await streams.stop()
        with pytest.raises(EngineDeadError, match="stopped"):
            async for _ in stream:
                pass

    asyncio.run(main())
