"""What a drafter of the target's states may read, and what it is told that it missed."""

import pytest

from outdraft.core.draft import DraftSource
from outdraft.core.plan import (
    NO_GAP,
    DraftChoice,
    DrafterGap,
    StepResult,
    WorkResult,
)
from outdraft.core.request import Request, ScheduledStep
from outdraft.scheduling.scheduler import Scheduler
from tests.scheduling.test_scheduler import (
    host_drafts,
    model_drafts,
    plain_results,
    request,
    run_plainly,
    scheduler,
)

WINDOW = 8


def eagle(**options) -> Scheduler:
    return scheduler(state_window=WINDOW, drafter_max_kept=-1, **options)


def eagle_drafts(number: int) -> DraftChoice:
    return DraftChoice(DraftSource.EAGLE3, num_model_drafts=number)


def everybody(_: Request) -> bool:
    return True


def run_followed(sched: Scheduler, steps: int) -> list[ScheduledStep]:
    made = []
    for _ in range(steps):
        step = sched.schedule({}, everybody, everybody)
        sched.commit(step, plain_results(step))
        sched.check_invariants()
        made.append(step)
    return made


def test_nobody_followed_means_that_no_state_is_kept_and_nothing_read():
    sched = eagle(max_num_batched_tokens=5)
    one = request("a", [1] * 12, 6)
    sched.add(one)
    while sched.has_work:
        step = sched.schedule({})
        assert not step.plan.keeps_states
        assert [work.num_drafter_new for work in step.works] == [0]
        sched.commit(step, plain_results(step))
        assert (one.num_states, one.num_drafter_computed) == (0, 0)
        assert sched.unread_tokens(one) == 0


def test_heads_have_no_state_of_a_chunk_without_logits():
    sched = scheduler(state_window=WINDOW, max_num_batched_tokens=4)
    one = request("a", [1] * 9, 6)
    sched.add(one)
    seen = []
    for _ in range(5):
        run_followed(sched, 1)
        seen.append((one.num_computed, one.num_states))
    # The last chunk has one token, whose state is the first one that they can draft with.
    assert seen == [(4, 0), (8, 0), (9, 1), (10, 2), (11, 3)]


def test_a_prompt_is_read_as_it_passes_by():
    sched = eagle(max_num_batched_tokens=7)
    sched.add(request("a", [1] * 20, 6))
    made = run_followed(sched, 3)
    assert [step.works[0].num_new for step in made] == [7, 7, 6]
    assert [step.works[0].num_drafter_new for step in made] == [7, 7, 5]
    [one] = sched.running
    assert (one.num_drafter_computed, one.num_states) == (19, WINDOW)
    assert one.drafter_gap == NO_GAP
    assert sched.unread_tokens(one) == 0  # the last one is read before the first draft


def test_a_prompt_that_is_not_read_leaves_the_states_of_its_end():
    sched = eagle()
    one = request("a", [1] * 20, 6)
    sched.add(one)
    step = sched.schedule({}, everybody)
    sched.commit(step, plain_results(step))
    assert step.plan.keeps_states
    assert step.works[0].num_drafter_new == 0
    assert (one.num_states, one.num_drafter_computed) == (WINDOW, 0)
    (work,) = sched.schedule({"a": eagle_drafts(1)}, everybody).works
    assert (work.gap.num_tokens, one.num_drafter_computed) == (20 - WINDOW, 20 - WINDOW)


def test_what_a_draft_follows_from_is_left_to_read():
    sched = eagle(max_num_batched_tokens=9)
    sched.add(request("a", [1] * 10, 6))
    [step] = run_followed(sched, 1)
    assert step.works[0].num_drafter_new == 8  # the ninth is read together with the newest
    step = sched.schedule({"a": eagle_drafts(1)})
    assert step.works[0].num_drafts == 1


def test_a_drafter_without_states_drafts_in_the_next_step_and_holds_no_block_before():
    sched = eagle(block_size=1)
    one = request("a", [1] * 6, 9)
    sched.add(one)
    run_plainly(sched, 2)
    step = sched.schedule({"a": eagle_drafts(3)})
    assert (step.plan.keeps_states, step.works[0].drafts) == (True, None)
    assert len(sched.table(one).ids) == step.works[0].start + 1
    sched.commit(step, plain_results(step))
    step = sched.schedule({"a": eagle_drafts(3)})
    assert step.works[0].num_drafts == 3
    assert (one.num_drafter_computed, one.drafter_gap.num_tokens) == (7, 7)


def test_a_network_without_the_states_that_it_needs_does_not_draft():
    sched = scheduler(state_window=1, drafter_max_kept=0)
    sched.add(request("a", [1] * 6, 9))
    run_plainly(sched, 1)
    choice = DraftChoice(DraftSource.MEDUSA, num_model_drafts=2)
    [work] = sched.schedule({"a": choice}).works
    assert work.drafts is None


def test_after_a_pause_the_drafter_reads_the_window_behind_what_it_has_read():
    sched = eagle(block_size=4)
    one = request("a", [1] * 9, 30)
    sched.add(one)
    run_followed(sched, 1)
    step = sched.schedule({"a": eagle_drafts(1)}, everybody)
    sched.commit(step, plain_results(step))
    assert (one.num_tokens, one.num_drafter_computed) == (11, 9)
    run_followed(sched, 20)
    assert sched.unread_tokens(one) == WINDOW - 1
    before = list(sched.table(one).ids)
    sched.schedule({"a": eagle_drafts(1)}, everybody)
    # Tokens 22 to 29 stand behind the two full blocks that were read before: token 22 at place 8.
    assert one.drafter_gap == DrafterGap(14, tuple(before[:2]), 5)
    assert one.num_drafter_computed == one.num_computed - WINDOW == 22


def test_a_refused_step_spoils_the_states_that_it_has_overwritten():
    sched = eagle()
    one = request("a", [1] * 9, 30)
    sched.add(one)
    run_followed(sched, 2)
    step = sched.schedule({"a": host_drafts(1, 1)}, everybody)
    sched.commit(step, StepResult((WorkResult(is_finite=False),), 3))
    assert (one.num_tokens, one.num_states) == (11, 0)


def test_a_draft_model_lags_by_all_that_it_has_not_read():
    sched = scheduler()
    one = request("a", [1] * 9, 30)
    sched.add(one)
    run_plainly(sched, 3)
    assert sched.unread_tokens(one) == 12 - 1
    step = sched.schedule({"a": model_drafts(2)})
    assert step.works[0].num_drafts == 2
    sched.commit(step, StepResult((WorkResult((1, 1, 1), (0, 1), (1, 1)),), 3))
    assert (one.num_tokens, one.num_drafter_computed, sched.unread_tokens(one)) == (15, 13, 0)
    run_plainly(sched, 4)
    assert sched.unread_tokens(one) == 4


@pytest.mark.parametrize(("token", "filled"), [(1, 8), (2, 4)])
def test_a_filled_block_is_of_use_before_the_token_that_it_was_read_with(token, filled):
    sched = eagle(block_size=4)
    sched.add(request("a", [1] * 13, 1))
    run_followed(sched, 1)
    second = request("b", [*[1] * 8, token, *[2] * 5], 9)
    sched.add(second)
    sched.schedule({}, everybody, everybody)
    assert (second.num_cached, second.num_drafter_computed) == (8, 8)
    assert second.num_drafter_computed - second.drafter_gap.num_tokens == filled


def test_blocks_behind_a_gap_serve_other_texts_where_their_slots_are_those_of_the_text():
    sched = eagle(block_size=4)
    sched.add(request("a", [1] * 17, 1))
    run_plainly(sched, 1)  # nobody follows: four blocks without the drafter's keys
    sched.add(request("b", [1] * 29, 1))  # it computes two of them again, as its window is so long
    run_followed(sched, 1)
    third = request("c", [1] * 30, 9)
    sched.add(third)
    sched.schedule({}, everybody, everybody)
    ids = sched.table(third).ids
    assert third.num_cached == 28
    assert third.drafter_gap == DrafterGap(8, tuple(ids[2:7]), 7)


@pytest.mark.parametrize(("is_followed", "cached"), [(True, 16 - WINDOW), (False, 16)])
def test_behind_a_prefix_that_was_never_read_a_drafter_has_its_window(is_followed, cached):
    sched = eagle(block_size=4)
    sched.add(request("a", [1] * 17, 1))
    run_plainly(sched, 1)
    second = request("b", [1] * 17, 9)
    sched.add(second)
    step = sched.schedule({}, lambda _: is_followed)
    sched.commit(step, plain_results(step))
    assert second.num_cached == cached
    assert second.num_states == (WINDOW if is_followed else 0)


@pytest.mark.parametrize("caches", [True, False])
def test_prompts_of_requests_that_never_draft_are_read_for_others_that_find_their_blocks(caches):
    sched = eagle(block_size=4, max_num_batched_tokens=6, caching=caches)
    sched.add(request("a", [1] * 17, 1))
    while sched.has_work:
        step = sched.schedule({}, lambda _: False, everybody)
        assert step.plan.keeps_states == caches
        sched.commit(step, plain_results(step))
    second = request("b", [1] * 17, 9)
    sched.add(second)
    sched.schedule({}, everybody, everybody)
    assert second.num_cached == (16 if caches else 0)
    assert second.drafter_gap == NO_GAP


def test_prompts_that_are_too_long_for_the_network_are_not_read():
    sched = eagle(block_size=4)
    sched.add(request("a", [1] * 17, 1))
    step = sched.schedule({}, lambda _: False, lambda _: False)
    assert not step.plan.keeps_states
    assert [work.num_drafter_new for work in step.works] == [0]
