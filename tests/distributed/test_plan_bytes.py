"""Plans and masks as ranks read them, against the same values written with all names and types."""

from types import UnionType
from typing import get_args, get_origin, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from msgspec import structs

from outdraft.core.decision import LiveStop
from outdraft.core.draft import Draft, DraftSource
from outdraft.core.grammar import AllowedTokens
from outdraft.core.plan import (
    Admission,
    DraftChoice,
    DrafterGap,
    StepPlan,
    TokenRules,
    Work,
)
from outdraft.ranks.messages import Masks, RunStep, order_of_bytes
from outdraft.ranks.messages import as_bytes as written
from tests.oracle.engines import METHODS, engine, prompts_of
from tests.oracle.test_plans_are_data import params_of_every_kind
from tests.reference.plain_data import as_bytes, from_bytes

COUNTS = st.integers(0, 1 << 20)
NUMBERS = st.floats(allow_nan=False)


def with_all_fields(kind, **known):
    """Values of a class, each field of which may be anything that its type allows."""
    own = {name: of_type(hint) for name, hint in get_type_hints(kind).items() if name not in known}
    return st.builds(kind, **own, **known)


def of_type(hint):
    if get_origin(hint) is tuple:
        first, *others = get_args(hint)
        if others == [...]:
            return st.lists(of_type(first), max_size=3).map(tuple)
        return st.tuples(*map(of_type, [first, *others]))
    if get_origin(hint) is UnionType:
        return st.one_of(*map(of_type, get_args(hint)))
    known = {int: COUNTS, float: NUMBERS}
    return known[hint] if hint in known else st.from_type(hint)


@st.composite
def drafts(draw) -> Draft:
    count = draw(st.integers(1, 12))
    parents = tuple(draw(st.integers(0, row)) for row in range(count))
    if draw(st.booleans()):
        parents = tuple(range(count))
    ids = tuple(draw(COUNTS) for _ in range(count))
    return Draft(ids, parents, draw(NUMBERS), draw(COUNTS))


@st.composite
def stops(draw) -> LiveStop:
    levels = st.lists(NUMBERS, min_size=5, max_size=5).map(tuple)
    return LiveStop(draw(levels), draw(levels), draw(NUMBERS), draw(COUNTS))


@st.composite
def plans(draw) -> StepPlan:
    shapes = draw(st.lists(of_type(tuple[int, ...]), min_size=1, max_size=3))
    rules = draw(st.lists(stops(), min_size=1, max_size=3))
    sources = st.sampled_from(DraftSource)
    of_network = st.builds(
        lambda source, count, levels: DraftChoice(source, num_model_drafts=count, levels=levels),
        sources,
        st.integers(1, 5),
        st.sampled_from(shapes),
    )
    with_rule = st.builds(
        lambda choice, stop: structs.replace(choice, stop=stop),
        of_network.filter(lambda choice: not choice.levels),
        st.sampled_from(rules),
    )
    choices = st.one_of(st.none(), st.builds(DraftChoice, sources, drafts()), of_network)
    if not all(shapes):
        choices = st.one_of(choices, with_rule)
    ids = arrays(np.int32, st.integers(0, 40), elements=st.integers(0, 200_000))
    params = st.sampled_from(params_of_every_kind())
    token_rules = with_all_fields(TokenRules, params=params, seed=COUNTS)
    admissions = with_all_fields(Admission, token_ids=ids, rules=token_rules)
    works = with_all_fields(Work, drafts=choices, gap=st.none() | with_all_fields(DrafterGap))
    return draw(
        with_all_fields(
            StepPlan,
            works=st.lists(works, max_size=4).map(tuple),
            admissions=st.lists(admissions, max_size=2).map(tuple),
        )
    )


def read_back(plan: StepPlan) -> StepPlan:
    order = order_of_bytes(written(RunStep(plan)))
    assert isinstance(order, RunStep)
    return order.plan


@pytest.mark.slow
@settings(max_examples=60)
@given(plans())
def test_any_plan_is_read_as_it_was_written(plan: StepPlan):
    read = read_back(plan)
    assert as_bytes(read) == as_bytes(from_bytes(StepPlan, as_bytes(plan)))
    assert [work.drafts for work in read.works] == [work.drafts for work in plan.works]
    assert all(one.token_ids.flags.writeable for one in read.admissions)


@pytest.mark.parametrize("method", METHODS)
def test_plans_of_engines_are_read_as_they_were_written(method: str):
    llm = engine("qwen2", method, block_size=4, num_blocks=18)
    launch, seen = llm.engine.runner.launch, list[StepPlan]()

    def reading(plan: StepPlan):
        read = read_back(plan)
        assert as_bytes(read) == as_bytes(from_bytes(StepPlan, as_bytes(plan)))
        seen.append(read)
        return launch(read)

    llm.engine.runner.launch = reading
    llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts_of([3, 21, 17, 9, 30, 8, 12, 5])],
        params_of_every_kind(),
        use_tqdm=False,
    )
    assert seen
    assert method == "plain" or any(work.drafts for plan in seen for work in plan.works)


def decoding(choice: DraftChoice | None) -> StepPlan:
    """A step of 64 requests; every sixteenth gets a block."""
    return StepPlan(
        tuple(
            Work(slot, 500 + slot, 1, True, choice, 32, () if slot % 16 else (3000 + slot,), 499)
            for slot in range(64)
        )
    )


def test_a_plain_step_takes_few_bytes_for_each_request():
    size = len(written(RunStep(decoding(None))))
    assert size <= 64 * 18


@settings(max_examples=40)
@given(st.integers(0, 5), st.integers(1, 4), st.integers(0, 3), st.randoms(use_true_random=False))
def test_masks_are_read_as_they_were_written(num_rows, num_words, num_ends, rng):
    masks = [
        [-1 if rng.random() < 0.5 else rng.randint(-(2**31), 2**31 - 1) for _ in range(num_words)]
        if rng.random() < 0.6
        else [-1] * num_words
        for _ in range(num_rows)
    ]
    ends = [(rng.randint(0, 9), rng.randint(-1, 9)) for _ in range(num_ends)]
    allowed = AllowedTokens(
        np.array(masks, dtype=np.int32).reshape(num_rows, num_words),
        np.array(ends, dtype=np.int64).reshape(-1, 2).T,
    )
    read = order_of_bytes(written(Masks.of(allowed)))
    assert isinstance(read, Masks)
    assert as_bytes(read.allowed) == as_bytes(allowed)


def test_rows_that_allow_everything_are_not_written():
    masks_RW = np.full((64, 4700), -1, dtype=np.int32)
    masks_RW[17, 3] = 5
    allowed = AllowedTokens(masks_RW, np.zeros((2, 0), dtype=np.int64))
    assert len(written(Masks.of(allowed))) < 2 * masks_RW[0].nbytes
