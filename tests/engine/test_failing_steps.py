"""A step that fails half-way: whoever aborts what ran leaves nothing behind, anywhere."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np
import pytest

from outdraft.control.policy import FixedLength
from outdraft.core.draft import Draft, DraftAsk, DraftSource
from outdraft.core.errors import EngineDeadError
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.policy import DraftPolicy
from outdraft.engine.assembly import Assembler, RequestAssembly
from outdraft.engine.async_engine import AsyncEngine
from outdraft.engine.engine import Engine, RequestDeltas
from outdraft.engine.llm import LLM
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
    llm.engine.drafting = DraftPolicy(llm.config.speculation, [proposer], None, FixedLength(3), 8)
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
        "launch": (core.runner, "launch"),
        "collect": (core.runner, "collect"),
        "commit": (core.scheduler, "commit"),
        "finish a request": (core.scheduler, "finish"),
        "add to a delta": (RequestDeltas, "add"),
        "take a delta": (RequestDeltas, "take"),
        "add to an output": (RequestAssembly, "add"),
        "record": (core, "_record"),
    }


@pytest.mark.parametrize("call", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize(
    "place",
    [
        *("choose", "schedule", "launch", "collect", "commit", "finish a request", "record"),
        *("add to a delta", "take a delta", "add to an output"),
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


@pytest.mark.parametrize(
    ("owner", "name"), [(RequestDeltas, "add"), (RequestDeltas, "take"), (RequestAssembly, "add")]
)
def test_what_ended_in_a_failing_step_is_aborted_and_its_reader_is_told(monkeypatch, owner, name):
    llm, proposer = counted()
    fail_at(monkeypatch, owner, name, 1)
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
                await asyncio.wait_for(anext(stream), timeout=60)
            last = [o async for o in streams.generate("1", [5, 6], greedy(2))][-1]
            assert last.finished

    asyncio.run(main())
    core.check_invariants()


@pytest.mark.parametrize("call", [1, 2])
def test_a_request_of_which_one_sequence_had_ended_is_gone_after_an_abort(monkeypatch, call: int):
    llm, proposer = counted()
    core = llm.engine
    core.add_request("0", [5, 6, 7], greedy(2, n=2))
    core.step()
    fail_at(monkeypatch, RequestDeltas, "add", call)
    with pytest.raises(RuntimeError):
        core.step()
    assert core.is_live("0")
    core.abort("0")
    assert not core.is_live("0")
    assert not core.has_work
    core.check_invariants()
    core.abort("0")
    assert proposer.finished == Counter(["0/0", "0/1"])


def test_outputs_that_nobody_was_told_of_are_named_after_the_failure_of_another(monkeypatch):
    llm, _ = counted()
    assembler = Assembler(llm.engine)
    for number, params in enumerate([greedy(1), greedy(1), greedy(9), greedy(9)]):
        assembler.add_request(str(number), [5, 6], params)  # the last one waits
    fail_at(monkeypatch, RequestAssembly, "add", 2)
    with pytest.raises(RuntimeError):
        assembler.step()
    assert not llm.engine.is_live("0")
    assert assembler.started_requests() == ["0", "1", "2"]
