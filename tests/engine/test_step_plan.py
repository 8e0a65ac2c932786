"""The first half of a step: what the scheduler is told of those who may draft soon."""

import pytest

from outdraft.core.request import Request
from outdraft.scheduling.scheduler import plan_step
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


@pytest.mark.parametrize(("due_in", "keeps"), [(0, True), (100, False)])
def test_states_are_kept_while_the_network_may_soon_draft(due_in, keeps):
    control = Scripted(lambda _: ())
    control.due_in = due_in
    assert kept([request(num_prompt=6)], 3, control, 16) == [keeps] * 3
