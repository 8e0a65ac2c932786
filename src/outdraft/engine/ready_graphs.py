"""Graphs of a GPU for the steps of most requests, made before the first one would wait for them.

A graph takes 10 to 60 ms to make, ten times as long as the step that it then is. Numbers of rows
and requests are rounded up (kernels/data/graph_sizes.py), so that few steps need most of the graphs
that a batch goes through while its requests end one by one. Longer texts, more requests, and
parameters that filter or penalize tokens get theirs when they come.
"""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

from outdraft.config.engine import EngineConfig
from outdraft.engine.cost_steps import Samples, ScratchSteps, Step
from outdraft.kernels.data.graph_sizes import rounded_requests, rounded_rows
from outdraft.runner.parallel_runner import StepRunner

MOST_S = 15.0
MOST_REQUESTS, MOST_DRAFTS = 32, 8
ALL_READ = -1  # a network's lag behind a step whose last draft was not accepted
_logger = logging.getLogger(__name__)


def make_graphs(config: EngineConfig, runner: StepRunner) -> None:
    """Run the usual steps, greedy and at temperature 1, of an idle engine that serves nobody yet;
    no longer than MOST_S."""
    end_s = (started_s := time.perf_counter()) + MOST_S
    max_model_len, number = runner.state.row_len - 1, 0
    for temperature in (0.0, 1.0):
        steps = ScratchSteps(
            runner, config.scheduler, max_model_len, most_long=1, temperature=temperature
        )
        for step in usual_steps(config, runner):
            if time.perf_counter() > end_s:
                _logger.info("no time is left for graphs: others are made when they are needed")
                return
            if steps.fits(step):
                steps.run(step, Samples())
                number += 1
    _logger.info("made graphs for %d steps in %.1f s", number, time.perf_counter() - started_s)


def usual_steps(config: EngineConfig, runner: StepRunner) -> Iterator[Step]:
    """Steps that together have all sizes of those of up to MOST_REQUESTS requests: as many drafts
    as there may be grow for each of them, or for all but some, and as many rows are read by the
    target, and by a network that is about to draft."""
    proposer, most = runner.proposer, min(config.speculation.max_drafts, MOST_DRAFTS)
    has_network = proposer is not None
    if proposer is not None:
        most = min(most, proposer.max_chain)
    seen = _Seen()
    counts = range(1, MOST_REQUESTS + 1)
    for count in sorted({rounded_rows(count) for count in counts}):
        for depth in range(most + 1):
            drafts = has_network and depth > 0
            step = Step(count, count * (1 + depth), is_network=drafts)
            yield seen.noted(step)
            if drafts and config.speculation.control != "fixed":
                yield replace(step, tells_margins=True)
            if drafts and count > 1:
                yield seen.noted(replace(step, num_rows=step.num_rows - depth, num_idle=1))
        if proposer is not None and proposer.drafting.is_tree:
            size = 1 + proposer.max_drafts
            yield Step(count, count * size, is_network=True, is_tree=True)
    for count in counts:
        for rows in range(count, count * (1 + most) + 1):
            step = Step(count, rows, is_network=has_network and rows > count)
            if seen.has_new_pass(step):
                yield seen.noted(step)
        if proposer is None or not most:
            continue
        # A network that reads states reads those of tokens whose successors are known.
        for lag in (0,) if proposer.drafter.state_window else (0, ALL_READ):
            step = Step(count, 2 * count, is_network=True, lag=lag)
            if seen.has_new_reading(step):
                yield seen.noted(step)


class _Seen:
    """Sizes of the passes of some steps: of the target's, and of those that read texts."""

    def __init__(self) -> None:
        self._passes, self._readings = set[tuple[int, int]](), set[tuple[int, int]]()

    def noted(self, step: Step) -> Step:
        self._passes.add(_sizes(step.num_requests, step.num_rows))
        if step.is_network:
            self._readings.add(_reading(step))
        return step

    def has_new_pass(self, step: Step) -> bool:
        return _sizes(step.num_requests, step.num_rows) not in self._passes

    def has_new_reading(self, step: Step) -> bool:
        return _reading(step) not in self._readings


def _reading(step: Step) -> tuple[int, int]:
    """Sizes of what a network reads before it drafts."""
    number = min(step.num_requests - step.num_idle, step.num_rows - step.num_requests)
    return _sizes(number, (2 + step.lag) * number)


def _sizes(num_requests: int, num_rows: int) -> tuple[int, int]:
    return rounded_requests(num_requests), rounded_rows(num_rows)
