"""Engines of several processes: they answer as one does, and no end of a process goes unnoticed."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from shutil import copytree
from typing import Any

import psutil
import pytest
from msgspec import structs

from outdraft.core.errors import ConfigError, EngineDeadError, RanksError
from outdraft.core.grammar import AllowedTokens
from outdraft.core.plan import StepResult, StepStats
from outdraft.core.sampling import SamplingParams
from outdraft.distributed.group import Ranks
from outdraft.distributed.process_groups import ProcessTransport
from outdraft.engine import engine as engine_module
from outdraft.engine.llm import LLM
from outdraft.kernels.native.ranks import MemoryTransport
from outdraft.ranks import launch
from outdraft.ranks import processes as ranks_module
from outdraft.runner.results import PendingStep
from tests.cli.pair import pair
from tests.server.process.engines import (
    PROMPTS,
    config,
    processes,
    ranks_of,
    stream,
    supervisor,
)

pytestmark = pytest.mark.tp
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, max_tokens=24, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.7, top_p=0.9, seed=4, max_tokens=24, presence_penalty=0.5),
    SamplingParams(temperature=0.0, max_tokens=9, structured={"kind": "regex", "text": "[a-f]+"}),
    SamplingParams(temperature=1.0, seed=5, max_tokens=24, n=2),
]
LONG = SamplingParams(temperature=1.0, seed=6, max_tokens=400, ignore_eos=True)
SUFFIX: dict[str, Any] = {"method": "suffix", "control": "fixed"}
ENDS_S = 60.0


def have_ended(ranks: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(ranks, ENDS_S)[1]


@contextmanager
def spread(size: int = 2, **options: Any) -> Iterator[LLM]:
    """An engine of several ranks, of which nothing is left afterwards."""
    chosen = config(tensor_parallel_size=size, **{"speculative_config": SUFFIX} | options)
    llm = LLM.from_config(chosen)
    ranks = ranks_of(os.getpid())
    assert len(ranks) == size - 1
    with closing(llm):
        yield llm
    assert have_ended(ranks)
    assert not ranks_of(os.getpid())


def in_step(llm: LLM, number: int, act: Callable[[], None]) -> None:
    """Do something behind a step."""
    counted: list[StepStats] = []

    def on_step(stats: StepStats) -> None:
        counted.append(stats)
        if len(counted) == number:
            act()

    llm.engine.on_step = on_step


def once_met(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Do something when the ranks have met and begin to load."""
    meet = ranks_module.join_ranks

    def meet_and_act(*args: Any) -> Ranks:
        joined = meet(*args)
        act()
        return joined

    monkeypatch.setattr(ranks_module, "join_ranks", meet_and_act)


def lone_rank() -> psutil.Process:
    [rank] = ranks_of(os.getpid())
    return rank


@pytest.fixture(params=["memory", pytest.param("sockets", marks=pytest.mark.slow)])
def any_transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks exchange over memory, then over sockets."""
    if request.param == "sockets":  # one that cannot share memory is enough
        monkeypatch.setattr(ranks_module, "memory_transports", lambda: None)


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("size", "draft_size", "transport"),
    [
        (2, 1, MemoryTransport),
        pytest.param(4, 2, MemoryTransport, marks=pytest.mark.slow),
        pytest.param(2, 1, ProcessTransport, marks=pytest.mark.slow),
    ],
)
def test_ranks_answer_as_one_process_does(
    size: int, draft_size: int, transport: type, monkeypatch: pytest.MonkeyPatch
):
    """They compare what they are told and what they choose. A drafter and the host draft."""
    if transport is ProcessTransport:  # one that cannot share memory is enough
        monkeypatch.setattr(ranks_module, "memory_transports", lambda: None)
    combined = {"method": "combined", "model": str(pair().drafter), "control": "fixed"}
    combined |= {"rejection_sample_method": "drafter_invariant"}
    alone = LLM.from_config(config(dtype="float64", speculative_config=combined))
    want = alone.generate(PROMPTS, PARAMS, use_tqdm=False)
    combined |= {"draft_tensor_parallel_size": draft_size}
    with spread(size, dtype="float64", speculative_config=combined, check_ranks=True) as llm:
        got = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert llm.engine.stats.num_accepted_tokens > 0
        assert len(llm.memory.ranks) == size
        assert isinstance(llm.models.ranks.target.transport, transport)
    told = [[(one.token_ids, one.text) for one in output.outputs] for output in got]
    assert told == [[(one.token_ids, one.text) for one in output.outputs] for output in want]


@pytest.mark.slow
@pytest.mark.usefixtures("any_transport")
def test_a_rank_that_is_killed_in_mid_request_is_named_with_how_it_ended():
    with spread() as llm:
        in_step(llm, 5, lambda: lone_rank().send_signal(signal.SIGKILL))
        with pytest.raises(RanksError, match="rank 1 of 2: its process was ended by SIGKILL"):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        with pytest.raises(RanksError, match="rank 1 of 2"):
            llm.generate(PROMPTS, LONG, use_tqdm=False)


@pytest.mark.slow
def test_the_death_of_a_rank_ends_the_step_in_which_rank_0_waits_for_it():
    def stop_and_kill() -> None:
        rank = lone_rank()
        rank.suspend()
        threading.Timer(0.5, rank.kill).start()

    with spread(rank_timeout_s=120.0) as llm:
        in_step(llm, 5, stop_and_kill)
        with pytest.raises(RanksError, match="rank 1 of 2") as told:
            llm.generate(PROMPTS, LONG, use_tqdm=False)
    assert str(told.value.__cause__).endswith("has ended")  # and not: does not answer in time


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.usefixtures("any_transport")
def test_a_rank_that_hangs_is_named_and_ended():
    with spread(rank_timeout_s=3.0) as llm:
        in_step(llm, 5, lambda: lone_rank().send_signal(signal.SIGSTOP))
        with pytest.raises(RanksError, match=r"rank 1 \(its process is stopped\).* for 3 s"):
            llm.generate(PROMPTS, LONG, use_tqdm=False)


@pytest.mark.slow
def test_an_error_of_rank_0_in_a_step_ends_all_ranks():
    def fail() -> None:
        llm.engine.runner.own._forward = None

    with spread() as llm:
        in_step(llm, 5, fail)
        with pytest.raises(RanksError, match="rank 0 of 2 left a step: TypeError"):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        assert not ranks_of(os.getpid())


@pytest.mark.slow
def test_a_step_whose_masks_cannot_be_made_fails_alone(monkeypatch):
    """The other rank has launched it, and waits for masks."""
    made = engine_module.allowed_tokens
    calls: list[int] = []

    def failing(*args: Any) -> AllowedTokens:
        calls.append(len(calls))
        if len(calls) == 3:
            raise RuntimeError("no masks")
        return made(*args)

    monkeypatch.setattr(engine_module, "allowed_tokens", failing)
    with spread(check_ranks=True) as llm:
        with pytest.raises(RuntimeError, match="no masks"):
            llm.generate(PROMPTS, PARAMS[3], use_tqdm=False)
        assert len(calls) == 3
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert all(one.finished for one in outputs)


@pytest.mark.slow
def test_hosts_that_cannot_be_closed_do_not_hide_why_the_ranks_ended(monkeypatch):
    class Jammed(launch.RankHosts):
        def close(self) -> None:
            super().close()
            raise RuntimeError("the door is jammed")

    monkeypatch.setattr(launch, "RankHosts", Jammed)
    with spread() as llm:
        in_step(llm, 5, lambda: lone_rank().send_signal(signal.SIGKILL))
        with pytest.raises(RanksError, match="rank 1 of 2: its process was ended by SIGKILL"):
            llm.generate(PROMPTS, LONG, use_tqdm=False)


@pytest.mark.slow
def test_ranks_that_part_end_the_engine_where_they_are_compared():
    """Rank 0 says that it chose one token more than it did."""

    def part() -> None:
        own = llm.engine.runner.own
        collect = own.collect

        def other(pending: PendingStep) -> StepResult:
            result = collect(pending)
            odd = structs.replace(result.works[0], token_ids=(0, *result.works[0].token_ids))
            return structs.replace(result, works=(odd, *result.works[1:]))

        own.collect = other

    with spread(check_ranks=True) as llm:
        in_step(llm, 5, part)
        with pytest.raises(RanksError, match="in step 6 rank 1 chose something else than rank 0"):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        assert not ranks_of(os.getpid())


@pytest.mark.slow
def test_a_rank_that_is_killed_while_it_loads_is_named_with_how_it_ended(monkeypatch):
    once_met(monkeypatch, lambda: lone_rank().kill())
    with pytest.raises(RanksError, match="rank 1 of 2: its process was ended by SIGKILL"):
        LLM.from_config(config(tensor_parallel_size=2, speculative_config=SUFFIX))
    assert not ranks_of(os.getpid())


@pytest.mark.slow
def test_a_rank_that_hangs_while_it_loads_is_named_and_ended(monkeypatch):
    """It is stopped as soon as the ranks have met; rank 0 loads its own part meanwhile."""
    monkeypatch.setattr(ranks_module, "LOADING_SILENCE_S", 3.0)
    once_met(monkeypatch, lambda: lone_rank().send_signal(signal.SIGSTOP))
    stopped = r"rank 1 \(its process is stopped\) of 2 shows no sign of work for 3 s"
    with pytest.raises(RanksError, match=stopped):
        LLM.from_config(
            config(tensor_parallel_size=2, speculative_config=SUFFIX, rank_timeout_s=1.0)
        )
    assert not ranks_of(os.getpid())


@pytest.mark.slow
def test_an_older_engine_of_the_same_ranks_is_refused_and_the_newer_one_goes_on():
    with spread() as llm:
        newer = LLM.from_config(llm.config, llm.models)
        with pytest.raises(RanksError, match="a newer engine runs on these ranks"):
            llm.generate(PROMPTS, PARAMS[0], use_tqdm=False)
        assert all(one.finished for one in newer.generate(PROMPTS, PARAMS[0], use_tqdm=False))


@pytest.mark.slow
def test_an_engine_that_cannot_be_built_leaves_no_ranks(tmp_path):
    folder = tmp_path / "model"
    copytree(pair().target, folder)
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{% if %}"}')
    chosen = replace(config(tensor_parallel_size=2, speculative_config=SUFFIX), model=str(folder))
    with pytest.raises(ConfigError) as told:
        LLM.from_config(chosen)
    assert told.tb is not None  # it holds all that had been built
    assert not ranks_of(os.getpid())


def test_what_is_wrong_with_the_model_is_told_before_a_process_is_started(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        LLM(str(tmp_path), tensor_parallel_size=2, device="cpu")
    assert not ranks_of(os.getpid())


@pytest.mark.slow
def test_a_server_whose_idle_engine_loses_a_rank_starts_another_one():
    async def run() -> None:
        client = supervisor(
            config(tensor_parallel_size=2, speculative_config=SUFFIX), restarts=True
        )
        await client.start()
        living = asyncio.create_task(client.run())
        try:
            await stream(client, "first", PROMPTS[0], PARAMS[0])
            [engine] = processes(os.getpid())
            old = ranks_of(engine)
            old[0].kill()
            await until(lambda: not client.is_alive)
            assert (client.ended_by or "").startswith("rank 1 of 2: its process was ended by SIGK")
            with pytest.raises(EngineDeadError, match="rank 1 of 2: its process was ended by SIG"):
                await stream(client, "second", PROMPTS[0], PARAMS[0])
            await until(lambda: client.is_alive)
            assert have_ended(old)
            updates = await stream(client, "third", PROMPTS[0], PARAMS[0])
            assert updates[-1].output.finished
            [engine] = processes(os.getpid())
            ranks = ranks_of(engine)
            assert len(ranks) == 1
            # However the engine ends, its ranks end too.
            os.kill(engine, signal.SIGKILL)
            assert have_ended(ranks)
        finally:
            client.close("the test is over")
            living.cancel()
            await asyncio.gather(living, return_exceptions=True)

    asyncio.run(run())


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.02)
