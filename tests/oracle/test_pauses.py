"""Networks that stop and go on at any time change nothing: the texts are those of plain decoding.

While they pause, the target's states are not kept, and prompts are mostly not read. So they go on
behind gaps, over windows, and with what other texts have left in shared blocks.
"""

from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from outdraft.control.facts import StepFacts
from outdraft.core.decision import Decision
from outdraft.core.sampling import SamplingParams
from tests.oracle.changing_lengths import PLAIN, ChangingLengths
from tests.oracle.engines import COMBINED, NETWORKS, engine, ids, prompts_of, run, with_kernels

FAMILY, NUM_TOKENS = "llama-llama3-rope", 24
WAYS: dict[str, dict[str, Any]] = {
    "preempted": {"num_blocks": 6},
    "preempted without shared blocks": {"num_blocks": 6, "enable_prefix_caching": False},
    "tiny blocks and chunks": {"block_size": 1, "num_blocks": 300, "max_num_batched_tokens": 5},
    "one by one": {"max_num_seqs": 1, "block_size": 4, "num_blocks": 40},
}


class Pausing(ChangingLengths):
    """Off and on for as many steps as are drawn. While it is off, the network is due in so many
    steps: far away, no states are kept; soon, they are."""

    def __init__(self, seed: int, due_in: int = 1000) -> None:
        super().__init__(seed)
        self._due_in = due_in
        self._steps = np.random.default_rng(seed + 1)
        self._left, self._is_off = 0, True
        self.num_pauses = 0

    def network_due_in(self) -> int:
        return self._due_in if self._is_off else 0

    def hold(
        self, num_requests: int, prompt_rows: int = 0, *, may_offer: bool = False
    ) -> Decision | None:
        self._left -= 1
        if self._left < 0:
            self._is_off, self._left = not self._is_off, int(self._steps.integers(1, 8))
            self.num_pauses += self._is_off
        return PLAIN if self._is_off else None

    def decide(self, facts: StepFacts) -> Decision:
        self._is_off &= not any(request.offers for request in facts.requests)
        return super().decide(facts)


@cache
def plain_texts(seed: int | None, kernels: str) -> list[list[int]]:
    return ids(run(engine(FAMILY, "plain", kernels=kernels), prompts(), params(seed)))


def prompts() -> list[list[int]]:
    """Prompts of three lengths; some begin like others."""
    first = prompts_of((3, 40, 17))
    return [*first, first[1], [*first[1][:33], 5, 6], [*first[1][:16], *first[2]]]


def params(seed: int | None) -> SamplingParams:
    temperature = 0.0 if seed is None else 0.8
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=NUM_TOKENS, ignore_eos=True
    )


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    due_in=st.sampled_from([1, 1000]),
    chosen=st.sampled_from([None, 3]),
    way=st.sampled_from([*WAYS]),
)
@pytest.mark.parametrize(("method", "kernels"), with_kernels([*NETWORKS, *COMBINED], ["eagle3"]))
def test_texts_do_not_depend_on_when_a_network_pauses(
    method: str,
    kernels: str,
    seed: int,
    due_in: int,
    chosen: int | None,
    way: str,
):
    llm = engine(FAMILY, method, kernels=kernels, **WAYS[way])
    control = Pausing(seed, due_in)
    llm.engine.drafting.control = control
    found = run(llm, prompts(), params(chosen))
    assert ids(found) == plain_texts(chosen, kernels)
    assume(control.num_pauses > 2)  # else it shows nothing, and another case is drawn


@pytest.mark.parametrize("method", ["eagle", "eagle3-tree", "p-eagle"])
def test_pauses_reach_gaps_and_preemptions(method: str):
    """Else they would prove nothing."""
    llm = engine(FAMILY, method, **WAYS["preempted"])
    control = llm.engine.drafting.control = Pausing(1)
    proposer = llm.engine.runner.proposer
    assert proposer is not None
    propose, missing = proposer.propose, list[int]()

    def watched(asks: Any, *others: Any) -> Any:
        missing.extend(ask.num_missing for ask in asks)
        return propose(asks, *others)

    proposer.propose = watched
    run(llm, prompts(), params(None))
    assert sum(number > 0 for number in missing) > 5
    assert any(number % 16 for number in missing)
    assert 0 in missing
    assert control.num_pauses > 2
