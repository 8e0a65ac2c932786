"""A step that fails half-way: whoever aborts what ran leaves nothing behind, anywhere."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import pytest

from outdraft.core.draft import Draft, DraftAsk, DraftSource
from outdraft.core.errors import EngineDeadError
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.policy import DraftPolicy
from outdraft.engine.async_engine import AsyncEngine
from outdraft.engine.engine import Engine
from outdraft.engine.llm import LLM
from outdraft.engine.output_builder import OutputBuilder
from tests.oracle.engines import engine, greedy, prompts_of


class CountingProposer:
    """Drafts nothing, and counts how often it is told that a sequence ended."""

    source = DraftSource.NGRAM

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()

    def propose(self, asks: Sequence[DraftAsk]) -> list[Draft]:
        return [Draft() for _ in asks]

    def finish(self, request_id: str, token_ids: np.ndarray | None) -> None:
        self.finished[request_id] += 1


def counted() -> tuple[LLM, CountingProposer]:
    llm = engine("qwen2", "ngram", max_num_seqs=3)
    proposer = CountingProposer()
    llm.engine.drafting = DraftPolicy(llm.config.speculation, [proposer], None, 8)
    return llm, proposer


def fail_at(monkeypatch, owner: object, name: str, call: int) -> None:
    """The call-th call of a method raises, before or behind what it does by turns."""
    method: Callable = getattr(owner, name)
    calls = [0]

    def failing(*args, **kwargs):
        calls[0] += 1
        if calls[0] == call and call % 2:
            raise RuntimeError("broken")
        result = method(*args, **kwargs)
        if calls[0] == call:
            raise RuntimeError("broken")
        return result

    monkeypatch.setattr(owner, name, failing)


# One short sequence ends in the third step, beside others that go on and one that waits.
PARAMS = [greedy(3), greedy(9, n=2), greedy(3), greedy(2)]
SEQUENCES = {"0/0", "1/0", "1/1", "2/0", "3/0"}


def places(core: Engine) -> dict[str, tuple[object, str]]:
    """What a step consists of."""
    return {
        "choose": (core.drafting, "choose"),
        "schedule": (core.scheduler, "schedule"),
        "launch": (core.executor, "launch"),
        "collect": (core.executor, "collect"),
        "commit": (core.scheduler, "commit"),
        "finish a request": (core.scheduler, "finish"),
        "start an output": (OutputBuilder, "start"),
        "add to an output": (OutputBuilder, "add"),
        "end an output": (OutputBuilder, "finish"),
        "record": (core, "_record"),
    }


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(
    "place",
    [
        *("choose", "schedule", "launch", "collect", "commit", "finish a request", "record"),
        *("start an output", "add to an output", "end an output"),
    ],
)
def test_every_sequence_ends_for_the_proposers_exactly_once(monkeypatch, place: str, call: int):
    llm, proposer = counted()
    fail_at(monkeypatch, *places(llm.engine)[place], call)
    with suppress(RuntimeError):  # there may be no such call
        llm.generate(prompts_of([5, 6, 7, 8]), PARAMS, use_tqdm=False)
    assert proposer.finished == Counter(SEQUENCES)
    assert not llm.engine.has_work
    llm.engine.check_invariants()


def test_without_a_failure_every_sequence_ends_exactly_once():
    llm, proposer = counted()
    llm.generate(prompts_of([5, 6, 7, 8]), PARAMS, use_tqdm=False)
    assert proposer.finished == Counter(SEQUENCES)


@pytest.mark.parametrize("name", ["add", "start"])
def test_what_ended_in_a_failing_step_is_aborted_and_its_reader_is_told(monkeypatch, name: str):
    llm, proposer = counted()
    fail_at(monkeypatch, OutputBuilder, name, 1)
    _read_one_that_fails(llm.engine)
    assert proposer.finished == Counter(["0/0", "1/0"])


def test_a_reader_is_told_when_the_step_fails_behind_its_last_token(monkeypatch):
    llm, proposer = counted()
    fail_at(monkeypatch, llm.engine, "_record", 1)
    _read_one_that_fails(llm.engine)
    assert proposer.finished == Counter(["0/0", "1/0"])


def _read_one_that_fails(core: Engine) -> None:
    async def main() -> None:
        async with AsyncEngine(core) as streams:
            stream = streams.generate("0", [5, 6], SamplingParams(max_tokens=1))
            with pytest.raises(EngineDeadError):
                await asyncio.wait_for(anext(stream), timeout=20)
            last = [o async for o in streams.generate("1", [5, 6], greedy(2))][-1]
            assert last.finished

    asyncio.run(main())
    core.check_invariants()


def test_an_output_of_which_one_sequence_had_ended_is_finished_by_an_abort(monkeypatch):
    llm, proposer = counted()
    core = llm.engine
    core.add_request("0", [5, 6, 7], greedy(2, n=2))
    core.step()
    fail_at(monkeypatch, OutputBuilder, "add", 1)
    with pytest.raises(RuntimeError):
        core.step()
    output = core.abort("0")
    assert output is not None
    assert output.finished
    assert [c.finish_reason for c in output.outputs] == ["abort", "abort"]
    assert proposer.finished == Counter(["0/0", "0/1"])
    assert core.abort("0") is None
