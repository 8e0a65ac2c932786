"""The scheduler against a simulated device that checks every position it is given to read."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.config.engine import CacheConfig, SchedulerConfig
from outdraft.control.facts import StepFacts
from outdraft.core.draft import Draft, DraftSource
from outdraft.core.errors import CapacityError, RequestError
from outdraft.core.plan import (
    DraftChoice,
    StepResult,
    WorkResult,
)
from outdraft.core.request import FinishReason, Request, RequestStatus, ScheduledStep
from outdraft.core.sampling import SamplingParams, SpeculationParams
from outdraft.kv.block_pool import BlockPool
from outdraft.scheduling.scheduler import Scheduler
from tests.scheduling.simulated_device import MODEL_CHAIN, Drafting, SimulatedDevice

DRAFTINGS = [
    MODEL_CHAIN,
    Drafting(levels=(2, 1, 1)),
    Drafting(DraftSource.EAGLE3, max_kept=-1),
    Drafting(DraftSource.EAGLE3, levels=(3, 2), max_kept=-1),
    Drafting(DraftSource.MEDUSA, max_kept=0),
]
VOCAB_SIZE = 3  # small, so that random prompts share prefixes
MAX_MODEL_LEN = 40


def request(
    request_id: str,
    prompt: Sequence[int],
    max_tokens: int = 8,
    *,
    stop: frozenset[int] = frozenset(),
    priority: int = 0,
    **params,
) -> Request:
    return Request(
        request_id,
        prompt,
        SamplingParams(max_tokens=max_tokens, **params),
        seed=0,
        max_model_len=MAX_MODEL_LEN,
        stop_token_ids=stop,
        priority=priority,
    )


def scheduler(
    num_blocks: int = 100,
    block_size: int = 4,
    caching: bool = True,
    state_window: int = 0,
    drafter_max_kept: int | None = None,
    num_draft_groups: int = 1,
    **options,
) -> Scheduler:
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 64, **options}
    return Scheduler(
        SchedulerConfig(**options),
        CacheConfig(block_size=block_size, enable_prefix_caching=caching),
        BlockPool(num_blocks, num_draft_groups),
        MAX_MODEL_LEN,
        state_window=state_window,
        drafter_max_kept=drafter_max_kept,
        num_draft_groups=num_draft_groups,
    )


def model_drafts(number: int) -> DraftChoice:
    return DraftChoice(DraftSource.MODEL, num_model_drafts=number)


def host_drafts(*token_ids: int) -> DraftChoice:
    return DraftChoice(DraftSource.NGRAM, Draft.chain(token_ids))


def plain_results(step: ScheduledStep, token_id: int = 1) -> StepResult:
    """Every draft is rejected; every work that samples gets token_id."""
    return StepResult(
        tuple(WorkResult((token_id,)) if work.samples else WorkResult() for work in step.works),
        step.plan.num_rows,
    )


def run_plainly(sched: Scheduler, steps: int) -> None:
    for _ in range(steps):
        step = sched.schedule({})
        sched.commit(step, plain_results(step))
        sched.check_invariants()


# --- the simulation ---------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """One simulated engine and what happens to it."""

    seed: int
    block_size: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str
    caching: bool
    num_requests: int
    drafting: Drafting
    state_window: int
    followed: float  # chance that a request is followed in a step
    num_draft_groups: int = 1


@st.composite
def worlds(draw) -> World:
    block_size = draw(st.sampled_from([1, 2, 4, 16]))
    needed = -(-MAX_MODEL_LEN // block_size)
    max_num_seqs = draw(st.integers(1, 5))
    drafting = draw(st.sampled_from(DRAFTINGS))
    return World(
        seed=draw(st.integers(0, 2**32)),
        block_size=block_size,
        num_blocks=draw(st.integers(needed, 3 * needed)),  # small: preemption is common
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 40)),
        policy=draw(st.sampled_from(["fcfs", "priority"])),
        caching=draw(st.booleans()),
        num_requests=draw(st.integers(1, 10)),
        drafting=drafting,
        state_window=draw(windows_of(drafting)),
        followed=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        num_draft_groups=draw(st.sampled_from([1, 1, 2, 4])),
    )


def windows_of(drafting: Drafting) -> st.SearchStrategy[int]:
    """How many states drafters of this kind keep; a step settles 11 tokens of a text at most."""
    if drafting.max_kept == -1:
        return st.integers(11, 20)
    return st.integers(1, 9) if drafting.source is DraftSource.MEDUSA else st.just(0)


class Simulation:
    """Random arrivals, drafts, acceptances and aborts; every claim is checked at every step."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = Random(world.seed)
        self.device = SimulatedDevice(
            self.rng, world.block_size, VOCAB_SIZE, world.drafting, world.state_window
        )
        self.sched = scheduler(
            world.num_blocks,
            world.block_size,
            world.caching,
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens,
            scheduling_policy=world.policy,
            state_window=world.state_window,
            drafter_max_kept=world.drafting.max_kept,
            num_draft_groups=world.num_draft_groups,
        )
        self.requests: list[Request] = []
        self.passed: set[str] = set()  # ids of requests that ever let others go first
        self.num_preemptions = self.num_moved = 0

    def run(self) -> None:
        for _ in range(2000):
            if len(self.requests) < self.world.num_requests and self.rng.random() < 0.5:
                self._arrive()
            if self.sched.has_work:
                self._step()
            elif len(self.requests) >= self.world.num_requests:
                break
        assert all(r.status is RequestStatus.FINISHED for r in self.requests)
        assert self.sched.pool.num_free == self.sched.pool.num_blocks

    def _arrive(self) -> None:
        """One request, or several with the same prompt and priority."""
        rng = self.rng
        prompt = [
            rng.randrange(VOCAB_SIZE) if rng.random() < 0.2 else 1
            for _ in range(rng.randint(1, 25))
        ]
        priority = rng.randint(0, 3)
        for _ in range(rng.choice([1, 1, 2, 4])):
            one = request(
                str(len(self.requests)),
                prompt,
                rng.randint(1, 15),
                stop=frozenset([0]) if rng.random() < 0.3 else frozenset(),
                priority=priority,
                prompt_logprobs=1 if rng.random() < 0.1 else None,
                speculation=SpeculationParams(enabled=rng.random() < 0.8),
            )
            self.requests.append(one)
            self.sched.add(one)

    def _chosen(self, _: Request) -> bool:
        return self.rng.random() < self.world.followed

    def _step(self) -> None:
        choices = self._choices()
        before = list(self.sched.running)
        owners = [(one.owner, one.num_preemptions) for one in before]
        step = self.sched.schedule(choices, self._chosen, self._chosen)
        self._check_plan(step, choices)
        self._check_order(before)
        self._check_owners(before, owners)
        result = self.device.execute(step)
        aborted = self._maybe_abort()
        lengths = {one.id: one.num_tokens for one in step.requests}
        booked = self.sched.commit(step, result)
        self.sched.check_invariants()
        assert aborted not in [one.request for one in booked]
        for one, work, outcome, added in booked:
            assert added == outcome.token_ids[: len(added)]
            assert bool(added) == work.samples
            assert one.num_tokens == lengths[one.id] + len(added)
            assert one.num_output <= (one.params.max_tokens or 0)
            is_cut = len(added) < len(outcome.token_ids)
            assert not is_cut or one.finish_reason is not None
            num_named = len(one.block_hashes)
            assert num_named <= one.num_tokens // self.world.block_size
        for one in self.sched.running:
            blocks = self.sched.table(one).ids
            self.device.check(self.device.target, one, blocks, one.num_computed)
            self.device.check_drafter(one, blocks, one.num_drafter_computed)

    def _choices(self) -> dict[str, DraftChoice]:
        rng = self.rng
        drafting = self.sched.decoding_requests()
        assert all(r in self.sched.running and r.num_uncomputed == 1 for r in drafting)
        choices: dict[str, DraftChoice] = {}
        for one in self.sched.running:  # also some that are not drafting: they must be ignored
            kind = rng.choice(["none", "model", "chain", "tree"])
            drafting = self.world.drafting
            ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 6))]
            if kind == "model":
                number = min(len(ids), sum(drafting.levels) or len(ids))
                choices[one.id] = DraftChoice(
                    drafting.source,
                    num_model_drafts=number,
                    levels=drafting.levels,
                )
            elif kind == "chain":
                choices[one.id] = host_drafts(*ids)
            elif kind == "tree":
                parents = tuple(rng.randint(0, row) for row in range(len(ids)))
                choices[one.id] = DraftChoice(DraftSource.SUFFIX, Draft(tuple(ids), parents))
        return choices

    def _maybe_abort(self) -> Request | None:
        live = [*self.sched.running, *self.sched.waiting]
        if self.rng.random() > 0.03 or not live:
            return None
        victim = self.rng.choice(live)
        assert self.sched.abort(victim.id) is victim
        assert victim.finish_reason is FinishReason.ABORT
        assert self.sched.abort(victim.id) is None
        return victim

    def _check_plan(self, step: ScheduledStep, choices: dict[str, DraftChoice]) -> None:
        assert 0 < step.plan.num_rows <= self.world.max_num_batched_tokens
        assert {one.id for one in step.requests} == {r.id for r in self.sched.running}
        for one, work in zip(step.requests, step.works, strict=True):
            assert work.start == one.num_computed
            assert len(self.sched.table(one).ids) * self.world.block_size >= (
                one.num_tokens + work.num_drafts if work.drafts else work.start + work.num_new
            )
            if work.drafts is None:
                continue
            choice = choices[one.id]
            assert work.samples
            assert 0 < work.num_drafts <= len(choice)
            assert work.num_drafts <= MAX_MODEL_LEN - one.num_tokens
            if not choice.is_device_tree:
                assert work.num_drafts <= one.max_drafts
            assert work.drafts == choice.truncated(work.num_drafts)

    def _check_owners(self, before: Sequence[Request], owners: Sequence[tuple[int, int]]) -> None:
        """A request stays with its draft group, unless that has two more than another one, or two
        more that want drafts."""
        pairs = [
            (one, owner)
            for one, (owner, num_preemptions) in zip(before, owners, strict=True)
            if one.num_preemptions == num_preemptions
        ]
        moved = [one for one, owner in pairs if one.owner != owner]
        self.num_moved += len(moved)
        assert sum(one.wants_drafts for one in moved) <= 1
        was = self._uneven([owner for _, owner in pairs])
        drafting_was = self._uneven([owner for one, owner in pairs if one.wants_drafts])
        assert bool(moved) == (was >= 2 or drafting_was >= 2)
        now = self._uneven([one.owner for one, _ in pairs])
        assert now <= max(1, was - bool(moved))

    def _uneven(self, owners: Sequence[int]) -> int:
        counts = [owners.count(group) for group in range(self.world.num_draft_groups)]
        return max(counts) - min(counts)

    def _key(self, one: Request) -> tuple[float, ...]:
        rank = one.priority if self.world.policy == "priority" else 0
        return rank, one.arrival_s

    def _gains_by_waiting(self, one: Request) -> bool:
        """Whether a running request that comes first computes a block of this one's text now."""
        size = self.world.block_size

        def fills_a_block_for_it(other: Request) -> bool:
            end = (other.num_computed // size + 1) * size
            return end < min(one.num_tokens, other.num_tokens) and (
                one.token_ids[:end].tolist() == other.token_ids[:end].tolist()
            )

        return (
            self.world.caching
            and one.params.prompt_logprobs is None
            and any(
                self._key(other) <= self._key(one) and fills_a_block_for_it(other)
                for other in self.sched.running
            )
        )

    def _check_order(self, before: list[Request]) -> None:
        """Whoever comes first is admitted first, but for those who gain by waiting, and preempted
        last."""
        running, key = self.sched.running, self._key
        admitted = [r for r in running if r not in before]
        waiting = self.sched.waiting
        if admitted:
            newest = max(map(key, admitted))
            passed = [one for one in waiting if key(one) < newest]
            assert all(map(self._gains_by_waiting, passed))
            assert len(passed) <= self.world.max_num_seqs - len(running)  # their slots are kept
            self.passed |= {one.id for one in passed}
        waiting = [one for one in waiting if one.id not in self.passed]
        preempted = [r for r in before if r not in running]
        survivors = [r for r in before if r in running]
        self.num_preemptions += len(preempted)
        assert not (admitted and preempted)
        if admitted and waiting:
            assert max(map(key, admitted)) <= min(map(key, waiting))
        if preempted and survivors:
            assert min(map(key, preempted)) >= max(map(key, survivors))
        if self.world.policy == "fcfs" and running and waiting:
            assert max(map(key, running)) <= min(map(key, waiting))


@settings(max_examples=150, deadline=None)
@given(worlds())
def test_any_mix_of_requests_drafts_and_aborts_is_computed_in_order_and_leaves_nothing(world):
    Simulation(world).run()


class ComparedWithPlain(Simulation):
    """Also plans each step without drafts, on a copy."""

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.num_cut = 0  # drafts that had to do with less than they asked for

    def _check_plan(self, step: ScheduledStep, choices: dict[str, DraftChoice]) -> None:
        super()._check_plan(step, choices)
        preempted = self.before.running.keys() - {one.id for one in self.sched.running}
        assert preempted == self.before.preempted_without_drafts
        num_drafts = sum(work.num_drafts for work in step.works)
        if not preempted:
            assert num_drafts <= self.before.room.free_rows
            assert num_drafts <= self.before.room.free_slots
        pairs = zip(step.requests, step.works, strict=True)
        asked = sum(len(choices[one.id]) for one, work in pairs if work.drafts is not None)
        self.num_cut += num_drafts < asked

    def _choices(self) -> dict[str, DraftChoice]:
        self.before = Before.of(self.sched)
        return super()._choices()


@dataclass(frozen=True)
class Before:
    """A scheduler as it stands before a step.

    Attributes:
        preempted_without_drafts: ids of those that a step without drafts would preempt.
    """

    running: dict[str, Request]
    room: StepFacts
    preempted_without_drafts: set[str]

    @classmethod
    def of(cls, sched: Scheduler) -> "Before":
        running = {one.id: one for one in sched.running}
        plain = deepcopy(sched)
        plain.schedule({})
        left = {one.id for one in plain.running}
        return cls(running, sched.room(), running.keys() - left)


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_drafts_preempt_nobody_and_keep_to_the_room_that_is_told(world):
    ComparedWithPlain(world).run()


def test_the_comparison_reaches_preemption_and_drafts_that_are_cut():
    """Else it would prove nothing about them."""
    preemptions = cut = 0
    for seed in range(10):
        simulation = ComparedWithPlain(
            World(seed, 2, 24, 5, 40, "fcfs", True, 10, MODEL_CHAIN, 0, 0.7)
        )
        simulation.run()
        preemptions += simulation.num_preemptions
        cut += simulation.num_cut
    assert preemptions > 5
    assert cut > 5


@pytest.mark.parametrize(("drafting", "window"), [*zip(DRAFTINGS[:3], (0, 0, 12), strict=True)])
def test_the_simulation_reaches_preemption_and_cached_prefixes(drafting: Drafting, window: int):
    """A simulation that never gets there would prove nothing about it."""
    preemptions = cached = drafter_hits = passed = gaps = 0
    for seed in range(40):
        simulation = Simulation(World(seed, 2, 24, 5, 40, "fcfs", True, 10, drafting, window, 0.7))
        simulation.run()
        preemptions += simulation.num_preemptions
        cached += sum(r.num_cached for r in simulation.requests)
        filled = simulation.sched.pool.is_drafter_filled
        drafter_hits += sum(filled(b, t) for b in range(24) for t in range(-1, VOCAB_SIZE))
        gaps += simulation.device.num_gaps
        passed += len(simulation.passed)
    assert preemptions > 20
    assert cached > 20
    assert drafter_hits > 20
    assert passed > 5
    assert gaps > 20 or not window


def test_the_simulation_reaches_requests_that_change_their_draft_group():
    moved = filled = 0
    for seed in range(20):
        world = World(seed, 2, 40, 5, 40, "fcfs", True, 10, MODEL_CHAIN, 0, 0.7, 3)
        simulation = Simulation(world)
        simulation.run()
        moved += simulation.num_moved
        is_filled = simulation.sched.pool.is_drafter_filled
        filled += sum(is_filled(block, group=group) for block in range(40) for group in (1, 2))
    assert moved > 20
    assert filled > 20


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_one_row_a_request_is_guaranteed_whatever_the_others_compute(world):
    sched = scheduler(
        1000, max_num_seqs=world.max_num_seqs, max_num_batched_tokens=world.max_num_batched_tokens
    )
    rng = Random(world.seed)
    for i in range(world.max_num_seqs):
        sched.add(request(str(i), [rng.randrange(3)] * rng.randint(1, 25)))
        sched.commit(step := sched.schedule({}), plain_results(step))
        choices = {r.id: host_drafts(1, 1, 1, 1, 1) for r in sched.running}
        step = sched.schedule(choices)
        assert {one.id for one in step.requests} == {r.id for r in sched.running}
        sched.commit(step, plain_results(step))


# --- single claims ----------------------------------------------------------------------------


def test_a_long_prompt_is_computed_in_chunks_of_the_budget():
    sched = scheduler(max_num_batched_tokens=8)
    sched.add(request("a", [1] * 20))
    made = []
    for _ in range(3):
        made.append(step := sched.schedule({}))
        sched.commit(step, plain_results(step))
    works = [step.works[0] for step in made]
    assert [(w.start, w.num_new, w.samples) for w in works] == [
        (0, 8, False),
        (8, 8, False),
        (16, 4, True),
    ]


def test_drafts_take_only_the_rows_that_no_running_request_needs():
    sched = scheduler(max_num_batched_tokens=4, max_num_seqs=3)
    for name in "abc":
        sched.add(request(name, [1], 20))
        run_plainly(sched, 1)
    step = sched.schedule({name: host_drafts(1, 1, 1) for name in "abc"})
    assert [work.num_rows for work in step.works] == [2, 1, 1]


def test_drafts_are_cut_to_the_blocks_that_are_left():
    sched = scheduler(num_blocks=3, block_size=4)
    sched.add(request("a", [1] * 6, 6))
    run_plainly(sched, 1)
    sched.pool.allocate(1)  # someone else's
    step = sched.schedule({"a": host_drafts(1, 1, 1, 1)})
    assert step.works[0].num_drafts == 1  # tokens 0..6 and one draft fill the request's two blocks


def test_drafts_preempt_nobody():
    sched = scheduler(num_blocks=4, block_size=4, caching=False)
    sched.add(request("a", [1] * 4, 8))
    sched.add(request("b", [1] * 4, 8))
    run_plainly(sched, 1)  # one block each; the next row of each needs one more
    step = sched.schedule({"a": host_drafts(1, 1, 1, 1, 1)})
    assert [one.id for one in step.requests] == ["a", "b"]
    assert step.works[0].num_drafts == 3


def test_the_newest_request_is_preempted_and_runs_again_with_its_tokens():
    sched = scheduler(num_blocks=3, block_size=4, caching=False)
    first, second = request("a", [1] * 4, 8), request("b", [2] * 4, 8)
    sched.add(first)
    sched.add(second)
    run_plainly(sched, 1)
    step = sched.schedule({})
    assert step.requests == (first,)
    assert second.status is RequestStatus.WAITING
    assert second.token_ids[second.num_prompt :].tolist() == [1]
    assert (second.num_preemptions, second.slot) == (1, None)
    sched.commit(step, plain_results(step))
    sched.abort("a")
    step = sched.schedule({})
    [work] = step.works
    assert (step.requests, work.start, work.num_new) == ((second,), 0, 5)


def test_a_rejected_draft_leaves_no_blocks_behind():
    sched = scheduler(block_size=1)
    sched.add(request("a", [1, 1, 1], 20))
    run_plainly(sched, 1)
    step = sched.schedule({"a": host_drafts(1, 1, 1, 1)})
    assert len(sched.table(step.requests[0]).ids) == 8
    sched.commit(step, plain_results(step))
    assert sched.pool.num_blocks - sched.pool.num_free == 4


def test_tokens_behind_a_stop_token_inside_an_accepted_draft_are_dropped():
    sched = scheduler()
    one = request("a", [1], 20, stop=frozenset([0]), stop_token_ids=[0])
    sched.add(one)
    run_plainly(sched, 1)
    step = sched.schedule({"a": host_drafts(2, 0, 2)})
    outcome = WorkResult((2, 0, 2, 1), (0, 1, 2), (2, 0, 2))
    [(_, _, _, added)] = sched.commit(step, StepResult((outcome,), step.plan.num_rows))
    assert added == (2, 0)
    assert one.token_ids[one.num_prompt :].tolist() == [1, 2, 0]
    assert (one.finish_reason, one.stop_reason) == (FinishReason.STOP, 0)
    assert not sched.has_work


def test_a_known_prefix_is_not_computed_again_and_its_last_token_is():
    sched = scheduler(block_size=4)
    sched.add(request("a", [1] * 8, 1))
    run_plainly(sched, 1)
    second = request("b", [1] * 8)
    sched.add(second)
    [work] = sched.schedule({}).works
    assert (work.start, work.num_new) == (4, 4)
    assert second.num_cached == 4


def test_generated_tokens_are_found_by_a_follow_up_prompt():
    sched = scheduler(block_size=2)
    sched.add(request("a", [1, 1], 4))
    run_plainly(sched, 4)
    sched.add(request("b", [1, 1, 1, 1, 1, 2]))
    assert sched.schedule({}).works[0].start == 4


# --- waiting for a prompt that is being computed ------------------------------------------------


def rows_of(step: ScheduledStep) -> dict[str, tuple[int, int]]:
    pairs = zip(step.requests, step.works, strict=True)
    return {one.id: (work.start, work.num_new) for one, work in pairs}


def copies(sched: Scheduler, names: str, prompt: Sequence[int], **options) -> None:
    for name in names:
        sched.add(request(name, prompt, **options))


@pytest.mark.parametrize("params", [{}, {"prompt_logprobs": 1}])
def test_one_of_several_equal_prompts_is_computed_and_the_others_take_its_blocks(params):
    sched = scheduler(block_size=4)
    sched.add(request("a", [1] * 18, **params))
    copies(sched, "bcd", [1] * 18)
    step = sched.schedule({})
    assert rows_of(step) == {"a": (0, 18)}
    sched.commit(step, plain_results(step))
    sched.check_invariants()
    step = sched.schedule({})
    assert rows_of(step) == {"a": (18, 1), "b": (16, 2), "c": (16, 2), "d": (16, 2)}
    sched.commit(step, plain_results(step))
    sched.check_invariants()


def test_a_prompt_in_chunks_is_waited_for_until_the_last_common_block():
    sched = scheduler(block_size=4, max_num_batched_tokens=8)
    sched.add(request("a", [1] * 20))
    sched.add(request("b", [1] * 9 + [2] * 11))
    made = []
    for _ in range(3):
        made.append(step := sched.schedule({}))
        sched.commit(step, plain_results(step))
    assert [rows_of(step) for step in made] == [
        {"a": (0, 8)},
        {"a": (8, 8)},
        {"a": (16, 4), "b": (8, 4)},
    ]


def test_whoever_has_nothing_to_wait_for_starts_and_the_slots_of_the_others_are_kept():
    sched = scheduler(block_size=4, max_num_seqs=4)
    copies(sched, "abc", [1] * 9)
    copies(sched, "xy", [2] * 3)
    step = sched.schedule({})
    assert list(rows_of(step)) == ["a", "x"]
    sched.commit(step, plain_results(step))
    assert list(rows_of(sched.schedule({}))) == ["a", "x", "b", "c"]


@pytest.mark.parametrize(("priority", "starts"), [(0, True), (1, False), (2, False)])
def test_nobody_waits_for_a_request_that_comes_later(priority, starts):
    sched = scheduler(block_size=4, max_num_batched_tokens=8, scheduling_policy="priority")
    sched.add(request("a", [1] * 30, priority=1))
    run_plainly(sched, 3)
    sched.add(request("b", [1] * 30, priority=priority))
    assert rows_of(sched.schedule({})) == {"a": (24, 6)} | ({"b": (24, 2)} if starts else {})


@pytest.mark.parametrize(
    ("caching", "num_prompt", "params"),
    [(False, 18, {}), (True, 4, {}), (True, 18, {"prompt_logprobs": 1})],
)
def test_nobody_waits_for_blocks_that_it_could_not_take(caching, num_prompt, params):
    sched = scheduler(block_size=4, caching=caching)
    copies(sched, "ab", [1] * num_prompt, **params)
    assert rows_of(sched.schedule({})) == {"a": (0, num_prompt), "b": (0, num_prompt)}


def test_nobody_waits_for_a_block_that_is_known_already():
    sched = scheduler(block_size=4, max_num_batched_tokens=16)
    sched.add(request("a", [1] * 12, 1))
    run_plainly(sched, 1)
    sched.add(request("b", [1] * 12, prompt_logprobs=1))  # computes its whole prompt again
    sched.add(request("c", [1] * 12))
    assert rows_of(sched.schedule({})) == {"b": (0, 12), "c": (8, 4)}


def test_the_drafter_reads_a_prompt_of_several_sequences_once():
    sched = scheduler(block_size=4)
    copies(sched, "abc", [1] * 18, max_tokens=20)
    run_plainly(sched, 1)
    step = sched.schedule({"a": model_drafts(1)})  # the drafter reads the prompt for a
    sched.commit(step, plain_results(step))
    assert [r.num_drafter_computed for r in sched.running] == [19, 0, 0]
    sched.schedule({"a": model_drafts(1), "b": model_drafts(1), "c": host_drafts(1)})
    assert [r.num_drafter_computed for r in sched.running] == [19, 16, 0]


def test_when_the_one_that_computes_is_aborted_the_next_one_computes():
    sched = scheduler(block_size=4, max_num_batched_tokens=8)
    copies(sched, "abc", [1] * 20)
    step = sched.schedule({})
    sched.abort("a")
    sched.commit(step, plain_results(step))
    assert rows_of(sched.schedule({})) == {"b": (0, 8)}


def test_requests_for_prompt_logprobs_compute_their_whole_prompt():
    sched = scheduler(block_size=2)
    sched.add(request("a", [1] * 6, 1))
    run_plainly(sched, 1)
    sched.add(request("b", [1] * 6, prompt_logprobs=0))
    assert sched.schedule({}).works[0].start == 0


@pytest.mark.parametrize(("num_accepted", "drafter_computed"), [(0, 4), (1, 5), (2, 6), (3, 6)])
def test_the_drafter_has_all_but_its_last_draft(num_accepted, drafter_computed):
    sched = scheduler()
    one = request("a", [1] * 3, 20)
    sched.add(one)
    run_plainly(sched, 1)
    step = sched.schedule({"a": model_drafts(3)})
    emitted = (1,) * (num_accepted + 1)
    rows = tuple(range(num_accepted))
    sched.commit(step, StepResult((WorkResult(emitted, rows, (1, 1, 1)),), step.plan.num_rows))
    assert one.num_computed == 4 + num_accepted
    assert one.num_drafter_computed == drafter_computed


def test_the_drafter_lags_while_others_draft():
    sched = scheduler()
    one = request("a", [1] * 3, 20)
    sched.add(one)
    run_plainly(sched, 3)
    assert (one.num_computed, one.num_drafter_computed) == (5, 0)


def test_a_cached_prefix_counts_for_the_drafter_up_to_the_first_block_it_did_not_fill():
    sched = scheduler(block_size=2)
    sched.add(request("a", [1] * 4, 9))
    run_plainly(sched, 1)
    step = sched.schedule({"a": model_drafts(1)})  # the drafter reads five tokens: two blocks
    sched.commit(step, plain_results(step))
    run_plainly(sched, 7)
    assert not sched.has_work
    second = request("b", [1] * 10)
    sched.add(second)
    sched.schedule({})
    assert (second.num_computed, second.num_drafter_computed) == (8, 4)


def test_priority_admits_the_lowest_number_first():
    sched = scheduler(scheduling_policy="priority", max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 0), ("c", 1)):
        sched.add(request(name, [1], 1, priority=priority))
    order = []
    while sched.has_work:
        step = sched.schedule({})
        order.append(step.requests[0].id)
        sched.commit(step, plain_results(step))
    assert order == ["b", "c", "a"]


def test_fcfs_ignores_priorities():
    sched = scheduler(max_num_seqs=1)
    for name, priority in (("a", 2), ("b", 0)):
        sched.add(request(name, [1], 1, priority=priority))
    assert sched.schedule({}).requests[0].id == "a"


def test_a_request_that_can_never_fit_is_refused_at_once():
    sched = scheduler(num_blocks=2, block_size=4)
    with pytest.raises(RequestError, match="9 tokens") as caught:
        sched.add(request("a", [1], 8))
    assert caught.value.field == "max_tokens"
    assert not sched.has_work


def test_a_full_queue_and_a_used_id_are_refused():
    sched = scheduler(max_waiting=1)
    sched.add(request("a", [1]))
    with pytest.raises(CapacityError, match="1 requests"):
        sched.add(request("b", [1]))
    run_plainly(sched, 1)
    with pytest.raises(RequestError) as caught:
        sched.add(request("a", [1]))
    assert caught.value.field == "request_id"


def test_check_invariants_sees_a_leaked_block():
    sched = scheduler()
    sched.pool.allocate(1)
    with pytest.raises(AssertionError):
        sched.check_invariants()


def test_a_cached_prefix_goes_to_the_draft_group_that_has_read_it():
    sched = scheduler(num_draft_groups=2)
    first, busy = request("first", [1] * 12, 6), request("busy", [2] * 12, 6)
    sched.add(busy)
    run_plainly(sched, 1)
    sched.add(first)
    run_plainly(sched, 1)
    assert (busy.owner, first.owner) == (0, 1)
    step = sched.schedule({"first": model_drafts(2)})
    sched.commit(step, plain_results(step))
    for one in (first, busy):
        sched.abort(one.id)
    again = request("again", [1] * 12 + [3], 6)
    sched.add(again)
    run_plainly(sched, 1)
    assert again.owner == 1
