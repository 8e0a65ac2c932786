"""Makes a GPU's CUDA graphs for common steps, before the first request would wait for them.

A graph takes 10 to 60 ms to make, 10 times as long as the step that it replays. Numbers of rows
and requests are rounded up (kernels/data/graph_sizes.py), so that few steps need most of the graphs
that a batch goes through while its requests end one by one. Longer texts, more requests, and
parameters that filter or penalize tokens get theirs when they come.
"""

import logging
import time
from collections.abc import Iterator

from outdraft.config.engine import EngineConfig
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.kernels.data.graph_sizes import rounded_requests, rounded_rows
from outdraft.runner.dummy_steps import DummyStep, DummySteps
from outdraft.runner.parallel_runner import StepRunner

MOST_S = 15.0
MOST_REQUESTS, MOST_DRAFTS = 32, 8
ALL_READ = -1  # num_unread after a step whose last draft was not accepted
_logger = logging.getLogger(__name__)


def make_graphs(config: EngineConfig, runner: StepRunner) -> None:
    """Run the common steps, greedy and at temperature 1, of an engine that has no requests yet;
    none begins later than MOST_S seconds after the first."""
    end_s = (started_s := time.perf_counter()) + MOST_S
    max_model_len, number = runner.state.row_len - 1, 0
    for temperature in (0.0, 1.0):
        steps = DummySteps(
            runner, config.scheduler, max_model_len, most_long=1, temperature=temperature
        )
        for step in common_steps(config, runner, steps):
            if time.perf_counter() > end_s:
                _logger.info("no time is left for graphs: others are made when they are needed")
                return
            steps.run(step)
            number += 1
    _logger.info("made graphs for %d steps in %.1f s", number, time.perf_counter() - started_s)


def common_steps(
    config: EngineConfig, runner: StepRunner, scratch: DummySteps
) -> Iterator[DummyStep]:
    """Yield steps that fit: for each number of requests up to MOST_REQUESTS, each number of drafts
    for all of them or for all but one, and each number of rows of the target."""
    most, proposer = 0, runner.proposer
    if config.speculation.sources:
        most = min(config.speculation.max_drafts, MOST_DRAFTS)
    if proposer is not None:
        most = min(most, proposer.max_chain)
    counts = range(1, min(MOST_REQUESTS, scratch.max_requests) + 1)
    passes = set[tuple[int, int]]()
    for count in {rounded_rows(count): count for count in counts}.values():
        for step in filter(scratch.fits, _grown(config, proposer, count, most)):
            passes.add(_sizes(step))
            yield step
    for count in counts:
        for rows in range(count, count * (1 + most) + 1):
            step = DummyStep(count, rows, is_network=proposer is not None and rows > count)
            if _sizes(step) not in passes and scratch.fits(step):
                passes.add(_sizes(step))
                yield step


def _grown(
    config: EngineConfig, proposer: DeviceProposer | None, count: int, most: int
) -> Iterator[DummyStep]:
    """Yield a plain step of `count` requests, and one for each number of drafts up to `most`."""
    yield DummyStep(count, count)
    for depth in range(1, most + 1):
        step = DummyStep(count, count * (1 + depth), is_network=proposer is not None)
        yield step
        if proposer is not None and config.speculation.control != "fixed":
            yield step._replace(tells_margins=True)
        if proposer is not None and count > 1:
            yield step._replace(num_rows=step.num_rows - depth, num_idle=1)
    if proposer is None or not most:
        return
    # A network that reads states reads accepted tokens except the newest, whose successor is not
    # there yet. Others read the newest 1 or 2.
    for num_unread in range(1, most + 1) if proposer.drafter.state_window else (ALL_READ,):
        yield DummyStep(count, 2 * count, is_network=True, num_unread=num_unread)
    if proposer.shapes[0]:
        yield DummyStep(count, count * (1 + proposer.max_drafts), is_network=True, is_tree=True)


def _sizes(step: DummyStep) -> tuple[int, int]:
    """The target's pass after rounding: requests, rows."""
    return rounded_requests(step.num_requests), rounded_rows(step.num_rows)
