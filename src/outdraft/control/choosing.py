"""Which plan a step follows, at the rate at which its time is worth something."""

from collections.abc import Sequence
from dataclasses import replace

from outdraft.control.decision import best_plan
from outdraft.control.drift import Costs
from outdraft.control.estimates import HORIZON, Estimates
from outdraft.control.facts import StepFacts
from outdraft.control.outlook import Outlook
from outdraft.control.plans import Option, Plan, Prices, plain

MARGIN = 0.01  # gain over plain decoding that is needed to leave it
WELCOME = 0.1  # gain for which the network reads prompts that it may never draft behind
MOST_ALIKE = 2  # requests that may all be hard; more are as usual requests are


def chosen_plan(
    options: Sequence[Sequence[Option]],
    prices: Prices,
    outlook: Outlook,
    known_speedup: float | None,
    *,
    is_drafting: bool,
) -> Plan:
    """The best plan at the rate of the long run or, if that is not given, at its own.

    Offers come and go, so what one is worth follows from the steps between. What a network's draft
    is worth follows from its request: a hard one has to be written to its end, however fast others
    were.

    known_speedup: tokens in the long run for each one of plain decoding. is_drafting: the
    latest plan had drafts.
    """
    speedup, plan = known_speedup or 1.0, plain(prices)
    for _ in range(4 if known_speedup is None else 1):
        plan, before = best_plan(options, prices.times(speedup)), speedup
        speedup = max(1.0, 1 + gain_of(plan, outlook))
        if abs(speedup - before) < MARGIN:
            break
    margin = 0.0 if is_drafting else MARGIN * prices.rate * outlook.alone_s
    return plan if plan.objective > margin else plain(prices)


def gain_of(plan: Plan, outlook: Outlook) -> float:
    """Tokens a second of the step with this plan against plain decoding, minus 1."""
    return outlook.gain(outlook.num_requests + plan.tokens, outlook.step_s(plan))


def pays_anew(
    facts: StepFacts, outlook: Outlook, prices: Prices, estimates: Estimates, costs: Costs
) -> bool:
    """Whether the network would draft for these requests if nothing were known of them.

    They may be hard ones. Should it not read the prompts that come next, it would do worse for
    those, too, and never draft again. Among many requests some are usual ones.
    """
    if len(facts.requests) > MOST_ALIKE:
        return False
    anew = [
        replace(
            request,
            request_id="",
            offers=(),
            lag_tokens=request.context_tokens,
            max_tokens=max(request.max_tokens, HORIZON),
        )
        for request in facts.requests
    ]
    plan = best_plan(estimates.options(anew, costs), prices)
    return plan.objective > WELCOME * prices.rate * outlook.alone_s
