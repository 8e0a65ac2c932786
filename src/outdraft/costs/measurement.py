"""Measures a table of costs from a few turns of steps that an idle engine runs.

All steps take turns, so that other load on the machine meets all of them alike. It only adds time,
so the lower quartile of the turns counts. A step that does not fit into the budget is left out: its
time is the prior's, times the ratio of the next smaller measured step to its own prior.
"""

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.roofline import ROWS
from outdraft.runner.dummy_steps import SHORT, DummyStep, DummySteps, PhaseSeconds

TURNS = 5
MOST_READY_S = 15.0  # beside the budget, to compile kernels and make graphs
IN_A_ROW, QUICK_S = 3, 0.02  # runs in a turn of a step that takes less
ROWS_OF_ONE = 8  # most rows of one request, if the engine has room for several
MOST_OF_FEW = 32  # most rows, if it has not
REQUESTS = (1, 2, 4, 8, 16, 32)
LAGS = (16, 64, 256)  # tokens
DEPTH = 4  # levels of a measured chain

PLAIN, LONG_TEXT = DummyStep(1, 1), DummyStep(1, 1, is_long=True)
LAGGING = [DummyStep(1, 2, is_network=True, is_long=True, num_unread=lag) for lag in (0, *LAGS)]
Measured = dict[DummyStep, PhaseSeconds]  # without the steps that there was no time for


def request_counts(steps: DummySteps) -> list[int]:
    """Numbers of requests that measured steps have, ascending from 1."""
    return [count for count in REQUESTS if count <= steps.max_requests]


def measure(
    steps: DummySteps, wanted: Sequence[DummyStep], prior: CostCurve, budget_s: float
) -> Measured:
    """Run the steps that fit in turns, until the budget is spent.

    Up to MOST_READY_S of work that is done once, such as compiling a kernel, do not count.

    prior: of the target's pass; predicts which steps fit into the time that is left.
    """
    end_s, slowdown, ready_s = time.perf_counter() + budget_s, 1.0, steps.ready_s
    runs: dict[DummyStep, list[PhaseSeconds]] = {step: [] for step in wanted if steps.fits(step)}
    for _ in range(TURNS):
        for step, own in runs.items():
            prior_s = float(prior.at(np.array(step.num_rows)))
            expected_s = sum(own[-1]) if own else slowdown * prior_s
            more_s = min(steps.ready_s - ready_s, MOST_READY_S)
            if time.perf_counter() + expected_s > end_s + more_s:
                continue
            found = [steps.run(step)]
            if sum(found[0]) < QUICK_S:  # the first run met the caches of the step before
                found = [steps.run(step) for _ in range(IN_A_ROW - 1)]
            own += found
            slowdown = sum(found[-1]) / prior_s
    return {
        step: PhaseSeconds(*np.quantile(own, 0.25, axis=0, method="lower").tolist())
        for step, own in runs.items()
        if own
    }


def target_steps(counts: Sequence[int]) -> list[DummyStep]:
    """List steps that no network drafts for, sorted by number of requests.

    counts: of requests, ascending from 1.
    """
    steps = {*_points(counts).values(), *(DummyStep(count, count) for count in counts)}
    return [*sorted(steps, key=lambda one: (one.num_requests, -one.num_rows)), LONG_TEXT]


def fitted_target(
    measured: Measured, counts: Sequence[int], num_long: int, prior: CostTable
) -> CostTable:
    """Fit the costs of target and host; the prior stays where nothing was measured.

    The host's time is the measured one of the runner plus the prior's for the scheduler.
    """
    context_s, request_s = prior.context_s, prior.request_s
    plain, points = measured.get(PLAIN), _points(counts)
    if plain is not None and LONG_TEXT in measured and num_long > SHORT:
        more_s = measured[LONG_TEXT].target_s - plain.target_s
        context_s = max(0.0, more_s) / (num_long - SHORT)
    most = max(count for count in counts if count <= ROWS_OF_ONE)
    several, alone = measured.get(DummyStep(most, most)), measured.get(points[most])
    if most > 1 and several is not None and alone is not None:
        more_s = several.target_s - alone.target_s - context_s * (most - 1) * SHORT
        request_s = max(0.0, more_s) / (most - 1)
    found_s = {
        rows: measured[step].target_s
        - context_s * step.num_requests * SHORT
        - request_s * (step.num_requests - 1)
        for rows, step in points.items()
        if step in measured
    }
    table = replace(
        prior, target=stretched(prior.target, found_s), context_s=context_s, request_s=request_s
    )
    if plain is None:
        return table
    # Without a network the phase of drafting is the host's time, too.
    host_s = plain.draft_s + plain.host_s
    host = {
        count: measured[step].draft_s + measured[step].host_s - host_s
        for count in counts
        if (step := DummyStep(count, count)) in measured
    }
    drafting, most = measured.get(points[DEPTH], plain), max(host)
    return replace(
        table,
        host_s=prior.host_s + host_s,
        host_request_s=prior.host_request_s + max(0.0, host[most]) / max(1, most - 1),
        host_draft_s=prior.host_draft_s + max(0.0, drafting.draft_s + drafting.host_s - host_s),
    )


def drafter_steps(
    counts: Sequence[int], depth: int, *, reads_texts: bool, shares_cache: bool = False
) -> list[DummyStep]:
    """List steps that a network drafts for, those of one request first.

    Args:
        counts: of requests, ascending from 1.
        depth: levels of its chains.
        reads_texts: it attends to texts, so it has to catch up with them.
        shares_cache: it finds them in the target's cache, so it has not.
    """
    alone, *others = (
        [DummyStep(count, count), _chain(count, depth), _chain(count, 1)] for count in counts
    )
    long = [_chain(1, depth)._replace(is_long=True)] if reads_texts else []
    lagging = LAGGING if reads_texts and not shares_cache else []
    return list(dict.fromkeys([*alone, *long, *lagging, *(step for own in others for step in own)]))


def fitted_drafter(
    measured: Measured, counts: Sequence[int], num_long: int, depth: int, prior: DrafterCost
) -> DrafterCost:
    """Fit the costs of a network; the prior stays where nothing was measured.

    A chain of one level takes start_s and one pass, a deeper chain more passes.
    """

    def own_s(step: DummyStep) -> float | None:
        """Seconds of drafting, less the host's part in a step without the network."""
        beside = measured.get(DummyStep(step.num_requests, step.num_requests))
        if step not in measured or beside is None:
            return None
        return max(0.0, measured[step].draft_s - beside.draft_s)

    num_passes = min(depth, prior.max_passes)
    pass_s, start_s = dict[int, float](), list[float]()
    for count in counts:
        whole_s, first_s = own_s(_chain(count, depth)), own_s(_chain(count, 1))
        if whole_s is None or first_s is None:
            continue
        pass_s[count] = whole_s
        if num_passes > 1:
            pass_s[count] = max(0.0, whole_s - first_s) / (num_passes - 1)
            start_s.append(first_s - pass_s[count])
    if not pass_s:
        return prior
    context_s = prior.context_s
    short_s = own_s(_chain(1, depth))
    long_s = own_s(_chain(1, depth)._replace(is_long=True))
    if short_s is not None and long_s is not None:
        look_s = prior.step_s([num_long]) - prior.start_s
        num_more = prior.num_read([num_long]) - prior.num_read([SHORT])
        context_s = max(0.0, long_s - short_s - look_s) / num_passes / max(1, num_more)
    catch_up, usual_s = prior.catch_up, own_s(LAGGING[0])
    lag_s = {
        step.num_unread: seconds for step in LAGGING[1:] if (seconds := own_s(step)) is not None
    }
    if usual_s is not None and lag_s:
        least = min(lag_s)
        more_s = {lag: max(0.0, seconds - usual_s) for lag, seconds in lag_s.items()}
        catch_up = curve({1: more_s[least] / least, **more_s})
    return replace(
        prior,
        passes=stretched(prior.passes, pass_s),
        catch_up=catch_up,
        start_s=max(0.0, float(np.median(start_s))) if start_s else 0.0,
        context_s=context_s,
    )


def curve(points: dict[int, float]) -> CostCurve:
    """Make a curve through points in any order, each lowered to the lowest one of more rows.

    Fewer rows take no longer. If they seem to, other load took that time.
    """
    rows = sorted(points)
    times_s = np.maximum([points[count] for count in rows], 0.0)
    lowest_s = np.minimum.accumulate(times_s[::-1])[::-1]
    return CostCurve(tuple(rows), tuple(lowest_s.tolist()))


def stretched(prior: CostCurve, points: dict[int, float]) -> CostCurve:
    """Make a curve through measured points; elsewhere the prior, times the ratio of the next
    smaller point to its prior (below the first point: of that one)."""
    if not points:
        return prior
    measured, found = sorted(points), dict(points)
    for rows in prior.rows:
        if rows not in points:
            near = max((count for count in measured if count < rows), default=measured[0])
            at_rows, at_near = prior.at(np.array([rows, near])).tolist()
            found[rows] = at_rows * points[near] / at_near
    return curve(found)


def _points(counts: Sequence[int]) -> dict[int, DummyStep]:
    """Steps of the target's curve by rows, each with the fewest requests that can have them."""
    most = max(MOST_OF_FEW, ROWS_OF_ONE * counts[-1])
    return {
        rows: DummyStep(next((c for c in counts if c * ROWS_OF_ONE >= rows), counts[-1]), rows)
        for rows in ROWS
        if rows <= most
    }


def _chain(count: int, depth: int) -> DummyStep:
    return DummyStep(count, count * (1 + depth), is_network=True)
