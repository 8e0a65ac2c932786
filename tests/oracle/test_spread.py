"""Targets spread over ranks, with drafters over fewer of them: they answer as one rank does."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest

from outdraft.core.outputs import RequestOutput
from outdraft.core.plan import StepPlan
from outdraft.core.sampling import SamplingParams
from outdraft.distributed.process_groups import ProcessTransport
from outdraft.engine.llm import LLM
from outdraft.kernels.choose import has_library
from outdraft.kernels.native.ranks import RankLink
from outdraft.loading.models import LoadedModels
from outdraft.runner.dummy_steps import DummyStep, DummySteps
from tests.oracle import forms
from tests.oracle.engines import (
    COMBINED,
    METHODS,
    config,
    engine,
    ids,
    parts,
    prompts_of,
    run,
    speculation,
)
from tests.oracle.live_rules import RandomRules
from tests.oracle.test_plans_are_data import params_of_every_kind
from tests.oracle.test_prefix_hits import BLOCK_SIZE, hits
from tests.pairwise import some
from tests.ranks import Spread, spread_models

FAMILY = "qwen2"
SMALL: dict[str, Any] = {"block_size": 4, "num_blocks": 18}  # too small for four at once
FEW = ("draft_model", "draft_model-tree", "eagle3", "medusa-tree", "mlp_speculator", "pard")
SIZES = ((2, 1), (2, 2), (4, 1), (4, 2), (4, 4))  # ranks of the target, and of the drafter
SPREAD = tuple(name for name in METHODS if parts(name)[0] != "self")
# With `FEW` and what runs over sockets, each kind of drafter is spread in one case at least.
DIVIDED = tuple((name, 2, 2) for name in ("pard", "eagle", "p-eagle", "dflash", "dspark-tree"))


def cases(
    *methods: str, every: Sequence[str] = (), further: Sequence[tuple[str, int, int]] = ()
) -> pytest.MarkDecorator:
    """By default each of `methods` on two ranks with a drafter on one, and in one other way, the
    first of them over four ranks too; `every` other method on two ranks; `further` ones."""
    chosen = {(name, *sizes) for name, sizes in zip(methods, cycle(SIZES[1:]), strict=False)}
    chosen |= {(name, *SIZES[0]) for name in (*methods, *every)}
    chosen |= {(methods[0], 4, 2), *further}
    rows = [(name, *sizes) for name, sizes in product((*methods, *every), SIZES)]
    found = [
        pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow])
        if case.values[1] == 4
        else case
        for case in some(rows, chosen)
    ]
    return pytest.mark.parametrize(("method", "size", "draft_size"), found)


LENGTHS = (3, 21, 17, 9, 30, 8, 12, 5)


@cache
def models(
    method: str, size: int, draft_size: int, over_sockets: bool = False
) -> list[LoadedModels]:
    """`over_sockets`: no rank shares memory with another."""
    chosen = config(FAMILY, speculation(FAMILY, method, 3), dtype="float64")
    return spread_models(chosen, size, draft_size, [None] * size if over_sockets else None)


@contextmanager
def spread(
    method: str,
    sizes: tuple[int, int],
    num_drafts: int = 3,
    over_sockets: bool = False,
    **options: Any,
) -> Iterator[tuple[LLM, Spread]]:
    """An engine over ranks; they have come to the same texts when they end."""
    speculative = speculation(FAMILY, method, num_drafts)
    control = options.pop("control", None)
    if speculative is not None and control is not None:
        speculative["control"] = control
    loaded = models(method, *sizes, over_sockets)
    llm = LLM.from_config(config(FAMILY, speculative, dtype="float64", **options), loaded[0])
    with Spread(llm, loaded) as ranks:
        yield llm, ranks
    texts_SL = llm.engine.runner.state.token_ids_SL
    for runner in ranks.runners[1:]:
        assert (runner.state.token_ids_SL == texts_SL)[:, :-1].all()


def seeded_params() -> list[SamplingParams]:
    """Only such texts are the same whatever drafts."""
    return [replace(one, seed=number) for number, one in enumerate(params_of_every_kind())]


def check_logprobs(got: list[RequestOutput], want: list[RequestOutput]) -> None:
    for one, other in zip(got, want, strict=True):
        places = [*zip(one.prompt_logprobs or (), other.prompt_logprobs or (), strict=True)]
        for completion, wanted in zip(one.outputs, other.outputs, strict=True):
            places += zip(completion.logprobs or (), wanted.logprobs or (), strict=True)
        for own, theirs in places:
            assert (own is None) == (theirs is None)
            if own is None or theirs is None:
                continue
            assert own.keys() == theirs.keys()
            for token_id, told in own.items():
                assert told.rank == theirs[token_id].rank
                assert told.logprob == pytest.approx(theirs[token_id].logprob, abs=1e-5)


@pytest.mark.slow
@pytest.mark.few(10)
@cases(*FEW, every=[one for one in SPREAD if one not in FEW], further=DIVIDED)
def test_ids_and_logprobs_are_those_of_one_rank(method: str, size: int, draft_size: int) -> None:
    """Greedy and seeded, with penalties, several sequences, and preemption."""
    prompts = prompts_of(LENGTHS)
    want = run(engine(FAMILY, method, dtype="float64", **SMALL), prompts, seeded_params())
    with spread(method, (size, draft_size), **SMALL) as (llm, _):
        got = run(llm, prompts, seeded_params())
    for outputs in (got, want):
        assert any(one.metrics and one.metrics.num_preemptions for one in outputs)
    assert ids(got) == ids(want)
    check_logprobs(got, want)


@pytest.mark.skipif(not has_library(), reason="no library")
def test_another_thread_sees_that_a_pass_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before what the library has sent in it is counted: a long one is no standstill."""
    settle, seen = RankLink.settle, list[tuple[int, int]]()
    chosen = config(FAMILY, None, dtype="float32")
    loaded = spread_models(chosen, 2, 1)
    group = loaded[0].ranks.target

    def counts() -> tuple[int, int]:
        assert group.transport is not None
        return group.transport.num_messages, group.calls.total()

    def noting(link: RankLink) -> None:
        before = counts() if link._group is group else None
        settle(link)
        if before is not None:
            seen.extend([before, counts()])

    monkeypatch.setattr(RankLink, "settle", noting)
    llm = LLM.from_config(chosen, loaded[0])
    with Spread(llm, loaded):
        run(llm, prompts_of((9,)), SamplingParams(temperature=0.0, max_tokens=5))
    between = list(zip(seen[1::2], seen[2::2], strict=False))
    assert len(between) >= 3
    for (sent, counted), (sent_then, counted_then) in between:
        assert sent_then - sent > counted_then - counted


@pytest.mark.parametrize("length", [2, 3])
def test_a_rank_may_have_no_token_of_a_prompt_to_score(length: int) -> None:
    """In float32, where they are scored by the compiled library."""
    prompts = prompts_of((length,))
    asked = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    chosen = config(FAMILY, None, dtype="float32")
    want = run(LLM.from_config(chosen), prompts, asked)
    loaded = spread_models(chosen, 2, 1)
    llm = LLM.from_config(chosen, loaded[0])
    with Spread(llm, loaded):
        got = run(llm, prompts, asked)
    assert ids(got) == ids(want)
    check_logprobs(got, want)


@pytest.mark.few(2)
@pytest.mark.parametrize("method", ["draft_model", "eagle3-tree"])
@pytest.mark.parametrize(
    ("size", "draft_size"), [*SIZES[:2], pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_ids_are_those_of_one_rank_over_sockets(method: str, size: int, draft_size: int) -> None:
    prompts, params = prompts_of(LENGTHS[:4]), seeded_params()[:4]
    want = run(engine(FAMILY, method, dtype="float64"), prompts, params)
    with spread(method, (size, draft_size), over_sockets=True) as (llm, _):
        groups = llm.models.ranks
        connected = [one.transport for one in (groups.target, groups.draft) if one.size > 1]
        assert all(isinstance(transport, ProcessTransport) for transport in connected)
        assert ids(run(llm, prompts, params)) == ids(want)


@pytest.mark.slow
@pytest.mark.few(2)
@cases("draft_model", every=["eagle3", "medusa", *COMBINED])
def test_they_are_while_live_rules_end_chains(method: str, size: int, draft_size: int) -> None:
    prompts = prompts_of(LENGTHS)
    want = run(engine(FAMILY, method, dtype="float64"), prompts, seeded_params())
    with spread(method, (size, draft_size), num_drafts=4) as (llm, _):
        rules = RandomRules(llm, seed=1)
        assert ids(run(llm, prompts, seeded_params())) == ids(want)
    assert rules.num_short > 5


@pytest.mark.few(2)
@cases("draft_model", every=["eagle3-tree", "mlp_speculator", *COMBINED])
def test_they_are_while_the_controller_chooses_lengths(
    method: str, size: int, draft_size: int
) -> None:
    prompts = prompts_of(LENGTHS)
    want = run(engine(FAMILY, "plain", dtype="float64"), prompts, seeded_params())
    with spread(method, (size, draft_size), control="adaptive") as (llm, _):
        assert ids(run(llm, prompts, seeded_params())) == ids(want)
        assert llm.engine.stats.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.few(2)
@cases("draft_model", every=["suffix", "eagle3-tree", "medusa"])
def test_as_many_tokens_are_found_in_the_prefix_cache(
    method: str, size: int, draft_size: int
) -> None:
    room: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_blocks": 600}
    want = hits(engine(FAMILY, "plain", dtype="float64", **room))
    with spread(method, (size, draft_size), **room) as (llm, _):
        assert hits(llm) == want


@pytest.mark.few(4)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@cases("draft_model", every=["suffix", "eagle3-tree", "medusa"])
def test_outputs_keep_to_their_grammars(
    method: str, size: int, draft_size: int, temperature: float
) -> None:
    asked = forms.asking(forms.regex(forms.REGEXES[0]), temperature=temperature, seed=1)
    params = [asked, SamplingParams(temperature=temperature, seed=2, max_tokens=12), asked]
    want = run(forms.engine(method, dtype="float64"), forms.PROMPTS, params)
    alone = forms.engine(method, dtype="float64")
    loaded = spread_models(alone.config, size, draft_size)
    llm = LLM.from_config(alone.config, loaded[0])
    with Spread(llm, loaded):
        assert ids(run(llm, forms.PROMPTS, params)) == ids(want)


@pytest.mark.parametrize(("draft_size", "owners"), [(1, [0, 1, 0, 1]), (2, [0, 0, 0, 0])])
def test_measured_steps_draft_in_all_groups(draft_size: int, owners: list[int]) -> None:
    with spread("draft_model", (2, draft_size)) as (llm, _):
        runner, plans = llm.engine.runner, list[StepPlan]()
        launch = runner.launch
        runner.launch = lambda plan: plans.append(plan) or launch(plan)
        steps = DummySteps(runner, llm.config.scheduler, 64)
        steps.run(DummyStep(4, 12, is_network=True))
    assert [[work.owner for work in plan.works] for plan in plans] == [owners]


@pytest.mark.parametrize("draft_size", [1, 2])
def test_each_rank_draws_for_its_part_and_what_it_drew_from_stays_there(draft_size: int) -> None:
    """With as many requests as ranks none is idle; q is nowhere but where it was drawn."""
    params = [SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)] * 4
    with spread("draft_model", (2, draft_size)) as (llm, ranks):
        drafted: list[list[int]] = [[], []]
        for number, runner in enumerate(ranks.runners):
            assert runner.proposer is not None
            runner.proposer.propose = _counted(runner.proposer.propose, drafted[number])
        run(llm, prompts_of((9, 7, 8, 6)), params)
    assert [max(numbers) for numbers in drafted] == [2, 2]  # half of the four requests


def _counted(propose: Any, numbers: list[int]) -> Any:
    def wrapped(asks: Any, *rest: Any) -> Any:
        made = propose(asks, *rest)
        probs_BNV, group, counts = made.probs_BNV, rest[-1].group, rest[-1].counts
        assert sum(counts) == len(asks)
        numbers.append(counts[group.rank])
        assert (0 if probs_BNV is None else len(probs_BNV)) == numbers[-1]
        return made

    return wrapped
