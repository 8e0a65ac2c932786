"""A decision that holds is looked at again where its drafts fare otherwise than was predicted.

To decide anew takes long beside a short step, but most of that time goes to what drafts cost, which
changes slowly. How easy a request is to draft for shows after a few steps. That alone is looked at
here: drafts get longer or shorter, or the decision ends. All of it follows from finished steps.
"""

import math

from outdraft.control.choosing import chosen_plan
from outdraft.control.drift import Costs
from outdraft.control.estimates import Estimates
from outdraft.control.facts import Decision, StepFacts
from outdraft.control.plans import Plan
from outdraft.control.standing import Standing

LOOKED_AT = frozenset((5, 13, 29))  # which step that a decision holds for begins with a look
UNUSUAL = 1.5  # deviations of what steps brought in sum, from what was predicted


def fares_otherwise(held: Standing) -> bool:
    """Whether the steps of a decision that drafts brought many more or fewer tokens than predicted.

    A draft's tokens have a variance of about 1.
    """
    if held.most - held.left not in LOOKED_AT or held.facts is None or held.num_gone:
        return False
    count = len(held.passed)
    excess = sum([step[0] for step in held.passed]) - count * held.decision.tokens
    return abs(excess) > UNUSUAL * math.sqrt(count * held.num_requests)


def revised(held: Standing, estimates: Estimates, costs: Costs) -> Plan:
    """What is best for the same requests by what is known of acceptance now."""
    assert held.facts is not None
    assert held.outlook is not None
    assert held.prices is not None
    options = estimates.options(held.facts.requests, costs)
    return chosen_plan(options, held.prices, held.outlook, None, is_drafting=True)


def is_like(plan: Plan, decision: Decision, facts: StepFacts) -> bool:
    """Whether a plan drafts what a decision does."""
    planned = {
        (facts.requests[pick.request].request_id, pick.levels, pick.option.shape)
        for pick in plan.picks
    }
    return planned == {(one.request_id, one.levels, one.shape) for one in decision.grants}
