"""A plan becomes a decision: grants, predicted times, and whose unused offers are looked at."""

from collections.abc import Container, Sequence

from outdraft.control.drift import Costs
from outdraft.control.estimates import Estimates
from outdraft.control.facts import Decision, Reason, StepFacts
from outdraft.control.outlook import Outlook
from outdraft.control.plans import Pick, Plan

SHADOWS = 8  # requests of a step whose unused offers are compared with the text


def decision_of(
    facts: StepFacts,
    outlook: Outlook,
    reason: Reason,
    plan: Plan | None,
    estimates: Estimates,
    costs: Costs,
    turn: int,
) -> Decision:
    """What a plan means for the engine; None: nobody drafts.

    turn: grows from step to step; of many unused offers others are looked at each time.
    """
    if plan is None:
        return Decision(
            (),
            0.0,
            0,
            reason,
            0.0,
            outlook.plain_s - outlook.host_s,
            outlook.host_s,
            outlook.plain_s,
            float(outlook.num_requests),
            0.0,
            _shadows(facts, (), turn),
        )
    picks = sorted(plan.picks, key=lambda pick: pick.request)
    lag, network = _lag(facts, picks)
    beside_s = costs.beside_s(network) if network else 0.0
    draft_s = plan.draft_s - outlook.drafting_s - beside_s
    catch_up_s = costs.catch_up_s(network, lag) if lag else 0.0
    tokens = outlook.num_requests + plan.tokens
    has_room = len(picks) * max(pick.levels for pick in picks) <= facts.max_rows
    grants = tuple(
        estimates.grant(
            facts.requests[pick.request], pick.option, pick.levels, plan, has_room=has_room
        )
        for pick in picks
    )
    rows = sum(grant.rows for grant in grants)
    edge = costs.table.target.edge(outlook.first_row + plan.rows)
    free = edge - outlook.first_row if edge is not None else rows
    served = {pick.request for pick in picks if not pick.option.is_network}
    return Decision(
        grants,
        plan.price,
        min(rows, facts.max_rows, free),
        reason,
        draft_s + catch_up_s,
        plan.target_s + beside_s,
        outlook.host_s + outlook.drafting_s,
        outlook.plain_s,
        tokens,
        outlook.gain(tokens, outlook.step_s(plan)),
        _shadows(facts, served, turn),
        catch_up_s,
    )


def _lag(facts: StepFacts, picks: Sequence[Pick]) -> tuple[int, str]:
    """Tokens that networks catch up with in this step, and the network."""
    used = [pick for pick in picks if pick.option.is_network]
    source = used[0].option.source if used else ""
    return sum(facts.requests[pick.request].lag_tokens for pick in used), source


def _shadows(facts: StepFacts, served: Container[int], turn: int) -> tuple[str, ...]:
    """Whose unused offers should be compared with the text; the others' turn comes later.

    served: places of the requests that take an offer.
    """
    unused = [
        request.request_id
        for index, request in enumerate(facts.requests)
        if len(request.offers) > (index in served)
    ]
    start = turn * SHADOWS % len(unused) if len(unused) > SHADOWS else 0
    return tuple((unused + unused)[start : start + min(SHADOWS, len(unused))])
