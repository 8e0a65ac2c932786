"""A table of costs from a few turns of steps that an idle engine runs.

All steps take turns, so that what else the machine does meanwhile meets all of them alike. It only
adds time, so that the lower quartile of the turns counts. A step that does not fit into the budget
is left out: there the prior stands in, stretched as the next smaller measured step stretches it.
"""

import time
from collections.abc import Callable, Sequence
from itertools import chain
from statistics import median

import numpy as np

from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.control.roofline import ROWS
from outdraft.engine.cost_steps import SHORT, Samples, ScratchSteps, Step

TURNS = 5
MOST_READY_S = 15.0  # beside the budget, in which kernels are compiled and graphs are made
IN_A_ROW, QUICK_S = 3, 0.02  # runs in a turn of a step that takes less
ROWS_OF_ONE = 8  # of one request; more rows belong to several, where the engine has room for them
MOST_OF_FEW = 32  # rows, where it has not
REQUESTS = (1, 2, 4, 8, 16, 32)
LAGS = (16, 64, 256)  # tokens
DEPTH = 4  # levels of a measured chain


class Measured:
    """What steps took; None for a step that was not measured."""

    def __init__(self, samples: dict[Step, Samples]) -> None:
        self.samples = samples

    def draft_s(self, step: Step) -> float | None:
        return self._usual(step, lambda samples: samples.draft_s)

    def target_s(self, step: Step) -> float | None:
        return self._usual(step, lambda samples: samples.target_s)

    def host_s(self, step: Step) -> float | None:
        return self._usual(step, lambda samples: samples.host_s)

    def _usual(self, step: Step, part: Callable[[Samples], list[float]]) -> float | None:
        samples = self.samples.get(step)
        if samples is None or not samples.draft_s:
            return None
        times_s = sorted(part(samples))
        return times_s[(len(times_s) - 1) // 4]


def take_turns(
    runner: ScratchSteps, wanted: Sequence[Step], prior: CostCurve, budget_s: float
) -> Measured:
    """Run the steps that there is room for in turns, until the budget is spent.

    What is made ready once, such as a kernel that is compiled, is not counted, up to MOST_READY_S.

    prior: of the target's pass; from it follows whether a step fits into what is left.
    """
    end_s, slowdown, texts = time.perf_counter() + budget_s, 1.0, (0, False)
    ready_s = runner.ready_s
    last_s: dict[Step, float] = {}
    samples = {step: Samples() for step in wanted if runner.fits(step)}
    for _ in range(TURNS):
        for step, own in samples.items():
            prior_s = float(prior.at(np.array(step.num_rows)))
            more_s = min(runner.ready_s - ready_s, MOST_READY_S)
            if time.perf_counter() + last_s.get(step, slowdown * prior_s) > end_s + more_s:
                continue
            seconds = runner.run(step, own)
            if seconds < QUICK_S:
                if texts != (texts := (step.num_requests, step.is_long)):
                    runner.run(step, Samples())  # other texts are in no cache yet
                seconds = _run_on(runner, step, own)
            slowdown = min(slowdown, seconds / prior_s) if last_s else seconds / prior_s
            last_s[step] = seconds
    return Measured(samples)


def _run_on(runner: ScratchSteps, step: Step, samples: Samples) -> float:
    """Run a short step again. Its first run is left out: it finds in the caches what the step
    before it left there, and in an engine that is mostly a step like itself."""
    samples.drop_last()
    return min(runner.run(step, samples) for _ in range(IN_A_ROW - 1))


class TargetSteps:
    """Steps that no network drafts for, and the table that follows from what they took.

    Attributes:
        wanted: the runner keeps what it knows of a batch, so steps of the same one follow each
            other, and plain ones, which tell the host's time, come last.
    """

    def __init__(self, counts: Sequence[int], num_long: int) -> None:
        """
        Args:
            counts: of requests, ascending from 1.
            num_long: tokens of the long text.
        """
        self._num_long = num_long
        most = max(MOST_OF_FEW, ROWS_OF_ONE * counts[-1])
        self._points = {rows: Step(_owners(rows, counts), rows) for rows in ROWS if rows <= most}
        self._plain = {count: Step(count, count) for count in counts}
        self._long = Step(1, 1, is_long=True)
        self.wanted: list[Step] = []
        for count, plain in self._plain.items():
            own = [step for step in self._points.values() if step.num_requests == count]
            self.wanted += [step for step in reversed(own) if step != plain] + [plain]
        self.wanted.append(self._long)

    def fitted(self, measured: Measured, prior: CostTable) -> CostTable:
        """What was measured, and the prior where nothing was. The host's times are the runner's."""
        context_s = prior.context_s
        short_s, long_s = measured.target_s(self._plain[1]), measured.target_s(self._long)
        if short_s is not None and long_s is not None:
            context_s = max(0.0, long_s - short_s) / (self._num_long - SHORT)

        def alone_s(step: Step, request_s: float) -> float | None:
            """As if one request with an empty context had all rows."""
            seconds, count = measured.target_s(step), step.num_requests
            beside_s = context_s * count * SHORT + request_s * (count - 1)
            return None if seconds is None else max(0.0, seconds - beside_s)

        shares = list[float]()
        for count, step in self._plain.items():
            several_s, one_s = alone_s(step, 0.0), alone_s(self._points[count], 0.0)
            if 1 < count <= ROWS_OF_ONE and several_s is not None and one_s is not None:
                shares.append((several_s - one_s) / (count - 1))
        request_s = max(0.0, median(shares)) if shares else prior.request_s
        found = {rows: alone_s(step, request_s) for rows, step in self._points.items()}
        return CostTable(
            stretched(prior.target, {rows: s for rows, s in found.items() if s is not None}),
            context_s,
            request_s,
            prior.drafters,
            *self._host(measured, prior),
            prior.offer_s,
        )

    def _host(self, measured: Measured, prior: CostTable) -> tuple[float, float, float]:
        """In a step of one request, for each further one, and more in a step with drafts.

        What the phase of drafting takes where nobody drafts is the host's, too.
        """
        found: dict[int, float] = {}
        for count, step in self._plain.items():
            if (host_s := self._host_s(measured, step)) is not None:
                found[count] = host_s
        if 1 not in found:
            return prior.host_s, prior.host_request_s, prior.host_draft_s
        most = max(found)
        drafting_s = self._host_s(measured, self._points[DEPTH])
        return (
            found[1],
            max(0.0, found[most] - found[1]) / max(1, most - 1),
            prior.host_draft_s if drafting_s is None else max(0.0, drafting_s - found[1]),
        )

    def _host_s(self, measured: Measured, step: Step) -> float | None:
        draft_s, host_s = measured.draft_s(step), measured.host_s(step)
        return None if draft_s is None or host_s is None else draft_s + host_s


class DrafterSteps:
    """Steps that a network drafts for, and what of their time is the network's.

    Attributes:
        wanted: as TargetSteps.
    """

    def __init__(
        self,
        counts: Sequence[int],
        num_long: int,
        *,
        depth: int,
        tree: Sequence[int],
        max_passes: int,
        reads_texts: bool,
        lags: bool = True,
        looks: bool = False,
    ) -> None:
        """
        Args:
            counts, num_long: as TargetSteps.
            depth: levels of the chains that the network is to draft.
            tree: rows of each level of its trees; (): it has none.
            max_passes: of a draft, however deep it is.
            reads_texts: the network has to read what it drafts behind.
            lags: it has texts to catch up with; else the target's cache has them.
            looks: it looks at all of a long text before it drafts, and then reads a part of it.
        """
        self._counts, self._num_long = counts, num_long
        self._num_passes = min(depth, max_passes)
        # Rows of a tree's further passes for each request: those of the levels above.
        self._further = tree[: max(0, min(len(tree), max_passes) - 1)]
        rows = 1 + depth
        self._plain = {count: Step(count, count) for count in counts}
        self._hosted = Step(1, rows)  # the same without the network
        self._first = {count: Step(count, 2 * count, is_network=True) for count in counts}
        self._whole = {count: Step(count, count * rows, is_network=True) for count in counts}
        size = 1 + sum(tree)
        self._trees = {
            count: Step(count, count * size, is_network=True, is_tree=True)
            for count in (counts if self._further else ())
        }
        self._long = Step(1, rows, is_network=True, is_long=True)
        self._first_long = Step(1, 2, is_network=True, is_long=True)
        self._lags = {
            lag: Step(1, 2, is_network=True, is_long=True, lag=lag)
            for lag in ((0, *LAGS) if lags and reads_texts else ())
        }
        alone, *others = (
            [
                self._plain[count],
                self._whole[count],
                self._first[count],
                *([self._trees[count]] if self._trees else []),
            ]
            for count in counts
        )
        alone.insert(1, self._hosted)
        long = [*([self._long] if reads_texts else []), *self._lags.values()]
        if looks:
            long.insert(1, self._first_long)
        self.wanted = list(dict.fromkeys(chain(alone, long, *others)))

    def fitted(self, measured: Measured, prior: DrafterCost) -> DrafterCost:
        """What was measured, and the prior where nothing was."""

        def own_s(step: Step) -> float | None:
            """Without what the host does in this phase anyway."""
            draft_s = measured.draft_s(step)
            host_s = measured.draft_s(self._plain[step.num_requests])
            return None if draft_s is None or host_s is None else max(0.0, draft_s - host_s)

        passes, starts = dict[int, float](), list[float]()
        for count in self._counts:
            whole_s, first_s = own_s(self._whole[count]), own_s(self._first[count])
            if whole_s is None or first_s is None:
                continue
            if self._num_passes == 1:
                passes[count] = whole_s
                continue
            pass_s = max(0.0, whole_s - first_s) / (self._num_passes - 1)
            passes[count] = pass_s
            starts.append(first_s - pass_s)
            if self._trees and (tree_s := own_s(self._trees[count])) is not None:
                number = len(self._further)
                rows = round(count * sum(self._further) / number)
                passes.setdefault(rows, max(0.0, tree_s - first_s) / number)
        if not passes:
            return prior
        context_s, look_s = 0.0, prior.look_s
        short_s, long_s = own_s(self._whole[1]), own_s(self._long)
        if short_s is not None and long_s is not None:
            more_s = max(0.0, long_s - short_s)
            if prior.max_context is not None and prior.max_context < self._num_long:
                looking_s = self._looking_s(own_s, more_s)
                if looking_s is not None:
                    look_s, more_s = looking_s / self._num_long, more_s - looking_s
            num_more = prior.num_read([self._num_long]) - prior.num_read([SHORT])
            context_s = more_s / self._num_passes / max(1, num_more)
        beside_s = 0.0
        behind_s, alone_s = measured.target_s(self._whole[1]), measured.target_s(self._hosted)
        if behind_s is not None and alone_s is not None:
            beside_s = max(0.0, behind_s - alone_s)
        return DrafterCost(
            stretched(prior.passes, passes),
            _catch_up({lag: own_s(step) for lag, step in self._lags.items()}, prior),
            max(0.0, median(starts)) if starts else 0.0,
            context_s,
            prior.max_passes,
            beside_s,
            prior.max_context,
            look_s,
        )

    def _looking_s(self, own_s: Callable[[Step], float | None], more_s: float) -> float | None:
        """What of the time that a draft of a long text takes longer is no pass's.

        A draft of one pass takes the look and a pass longer, one of several as many passes.
        """
        short_s, long_s = own_s(self._first[1]), own_s(self._first_long)
        if short_s is None or long_s is None or self._num_passes == 1:
            return None
        first_s = long_s - short_s
        passes_s = max(0.0, more_s - first_s) * self._num_passes / (self._num_passes - 1)
        return max(0.0, more_s - passes_s)


def request_counts(runner: ScratchSteps) -> list[int]:
    """How many requests the measured steps have."""
    return [count for count in REQUESTS if count <= runner.max_requests]


def curve(points: dict[int, float]) -> CostCurve:
    """Through points in any order, but none is above a point of more rows.

    Fewer rows take no longer. If they seem to, something else took that time.
    """
    rows = sorted(points)
    times_s = np.maximum([points[count] for count in rows], 0.0)
    lowest_s = np.minimum.accumulate(times_s[::-1])[::-1]
    return CostCurve(tuple(rows), tuple(lowest_s.tolist()))


def stretched(prior: CostCurve, points: dict[int, float]) -> CostCurve:
    """Through measured points; elsewhere the prior, times what the next smaller point took more
    than the prior says (below the first point: that one)."""
    if not points:
        return prior
    measured = sorted(points)
    found = dict(points)
    for rows in prior.rows:
        if rows not in points:
            near = max((count for count in measured if count < rows), default=measured[0])
            at_rows, at_near = prior.at(np.array([rows, near])).tolist()
            found[rows] = at_rows * points[near] / at_near
    return curve(found)


def _owners(rows: int, counts: Sequence[int]) -> int:
    """Requests that so many rows belong to."""
    return next((count for count in counts if count * ROWS_OF_ONE >= rows), counts[-1])


def _catch_up(lags: dict[int, float | None], prior: DrafterCost) -> CostCurve:
    """What a backlog adds to the pass that reads it. `lags`: 0 stands for a usual step. The longest
    ones may not have been measured: these take so much longer than those that were as the prior
    says."""
    usual_s = lags.get(0)
    found = {
        lag: max(0.0, seconds - usual_s)
        for lag, seconds in lags.items()
        if lag and seconds is not None and usual_s is not None
    }
    if not found:
        return prior.catch_up
    least, most = min(found), max(found)
    more = [lag for lag in lags if lag > most]
    for lag, prior_s in zip(more, prior.catch_up.at(np.array(more)).tolist(), strict=True):
        found[lag] = found[most] + max(0.0, prior_s - float(prior.catch_up.at(np.array(most))))
    return curve({1: found[least] / least, **found})
