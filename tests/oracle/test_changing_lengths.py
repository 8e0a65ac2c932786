"""Whatever decides lengths, and however often it changes its mind, texts stay the target's."""

from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.control.facts import StepFacts, StepOutcome
from outdraft.core.decision import Decision
from outdraft.core.sampling import SamplingParams
from outdraft.engine.build import warm_up
from tests.oracle.changing_lengths import ChangingLengths
from tests.oracle.engines import (
    METHODS,
    NETWORKS,
    TREE,
    engine,
    greedy,
    greedy_oracle,
    ids,
    parts,
    prompts_of,
    run,
)
from tests.pairwise import rows

FAMILY = "mistral-window"
LENGTHS = (3, 21, 40, 9, 33)
NUM_TOKENS = 30
WAYS: dict[str, dict[str, Any]] = {
    "as-it-comes": {},
    "block-size-1": {"block_size": 1, "num_blocks": 400},
    "preempted": {"num_blocks": 6},
    "tiny-chunks": {"max_num_batched_tokens": 6},
    "reference-kernels": {"kernels": "reference"},
}


@pytest.mark.few(35)
@pytest.mark.parametrize(
    ("method", "way"), rows(product(METHODS[1:], WAYS), lambda method, way: (*parts(method), way))
)
def test_greedy_texts_do_not_change(method: str, way: str):
    llm = engine(FAMILY, method, num_drafts=4, **WAYS[way])
    control = llm.engine.drafting.control = ChangingLengths(seed=len(method) + len(way))
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(FAMILY, LENGTHS, NUM_TOKENS)
    assert control.lengths
    if way == "preempted":
        assert any(output.metrics.num_preemptions for output in outputs)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000), method=st.sampled_from(["combined", "combined-eagle3", "eagle"])
)
def test_they_do_not_at_any_sequence_of_decisions(seed: int, method: str):
    llm = engine(FAMILY, method, num_drafts=5)
    llm.engine.drafting.control = ChangingLengths(seed)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(FAMILY, LENGTHS, NUM_TOKENS)


SAMPLED = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=11)


@pytest.mark.slow
@pytest.mark.few(25)
@pytest.mark.parametrize("method", METHODS[1:])
@pytest.mark.parametrize("rule", ["drafter_invariant", "block"])
def test_a_seed_has_one_text_at_all_lengths(method: str, rule: str):
    """A request that brings a seed has it by any rule."""
    prompts, params = prompts_of(LENGTHS), [SAMPLED] * len(LENGTHS)
    plain = ids(run(engine(FAMILY, "plain"), prompts, params))
    for seed in range(2):
        llm = engine(FAMILY, method, num_drafts=4, rejection_sample_method=rule)
        llm.engine.drafting.control = ChangingLengths(seed)
        assert ids(run(llm, prompts, params)) == plain


@pytest.mark.parametrize("method", METHODS[1:])
def test_without_a_seed_the_invariant_rule_has_one_text_at_all_lengths(method: str):
    params = SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = prompts_of(LENGTHS)
    plain = ids(run(engine(FAMILY, "plain"), prompts, params))
    llm = engine(FAMILY, method, num_drafts=4, rejection_sample_method="drafter_invariant")
    llm.engine.drafting.control = ChangingLengths(3)
    assert ids(run(llm, prompts, params)) == plain


@pytest.mark.parametrize("method", ["combined", "combined-eagle3"])
def test_the_policy_here_really_changes_sources_and_lengths(method: str):
    """Else the tests above would prove less than they say."""
    llm = engine(FAMILY, method, num_drafts=4)
    control = llm.engine.drafting.control = ChangingLengths(1)
    run(llm, prompts_of(LENGTHS), greedy(50))
    assert len({source for source, _ in control.lengths}) >= 2
    assert {length for _, length in control.lengths} == {0, 1, 2, 3, 4}
    assert control.num_mixed > 5
    assert control.num_stopped > 5
    assert control.num_shadows > 5


@pytest.mark.parametrize("method", [name for name in NETWORKS if name.endswith("-tree")])
def test_chains_and_trees_take_turns_and_change_no_greedy_text(method: str):
    llm = engine(FAMILY, method, num_drafts=4)
    control = llm.engine.drafting.control = ChangingLengths(2)
    assert ids(run(llm, prompts_of(LENGTHS), greedy(50))) == greedy_oracle(FAMILY, LENGTHS, 50)
    assert control.shapes == {(), tuple(TREE["tree_levels"])}
    assert control.num_stopped > 0


@pytest.mark.parametrize("method", ["combined", "eagle3", "medusa-tree", "suffix-tree"])
def test_the_controller_itself_changes_no_greedy_text(method: str):
    llm = engine(FAMILY, method, num_drafts=4, control="adaptive")
    outputs = run(llm, prompts_of(LENGTHS), greedy(50))
    assert ids(outputs) == greedy_oracle(FAMILY, LENGTHS, 50)


def test_nothing_is_learned_while_an_engine_warms_up():
    llm = engine(FAMILY, "combined", num_drafts=4, control="adaptive")
    control = llm.engine.drafting.control = Untouched()
    warm_up(llm.engine)
    assert llm.engine.drafting.control is control
    assert llm.engine.stats.num_drafts > 0


class Untouched(ChangingLengths):
    """Fails if it is asked or told anything."""

    def __init__(self) -> None:
        super().__init__(0)

    def decide(self, facts: StepFacts) -> Decision:
        raise AssertionError("asked while nothing should be learned")

    def observe(self, outcome: StepOutcome) -> None:
        raise AssertionError("told while nothing should be learned")
