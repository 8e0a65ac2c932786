"""The first half of a step: what the scheduler is told of those who may draft soon."""

import pytest

from outdraft.core.request import Request
from outdraft.engine.step_plan import plan_step
from tests.drafting.test_policy import Scripted, policy, request
from tests.scheduling.test_drafter_books import eagle
from tests.scheduling.test_scheduler import plain_results


def kept(prompts: list[Request], num_steps: int, control: Scripted, rows: int) -> list[bool]:
    """Whether each step keeps states."""
    sched, ours = eagle(max_num_batched_tokens=rows), policy(drafter_max_len=100, control=control)
    for one in prompts:
        sched.add(one)
    keeps: list[bool] = []
    for _ in range(num_steps):
        step = plan_step(sched, ours)
        keeps.append(step.plan.keeps_states)
        sched.commit(step, plain_results(step))
    return keeps


@pytest.mark.parametrize(
    ("num_prompt", "rows", "keeps"),
    [
        (6, 16, [True, False, False, False]),
        (12, 5, [True, True, True, False]),
        (11, 5, [True, True, True, False]),  # of the last step it reads one token
        (1, 16, [True, False, False, False]),
    ],
)
def test_where_drafts_would_pay_for_new_requests_states_are_kept_while_prompts_are_read(
    num_prompt, rows, keeps
):
    control = Scripted(lambda _: ())
    control.due_in, control.due_in_beside_prompts = 100, 0
    assert kept([request(num_prompt=num_prompt)], 4, control, rows) == keeps


@pytest.mark.parametrize(("due_in", "keeps"), [(0, True), (100, False)])
def test_else_prompts_make_no_difference(due_in, keeps):
    control = Scripted(lambda _: ())
    control.due_in = due_in
    assert kept([request(num_prompt=6)], 3, control, 16) == [keeps] * 3
