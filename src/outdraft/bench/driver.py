"""Runs requests on an engine here: to their end, for a moment, or in turn with other engines."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from random import Random
from time import perf_counter

from outdraft.bench.workloads import BenchRequest
from outdraft.core.errors import GenerationError
from outdraft.core.outputs import RequestOutput
from outdraft.core.plan import StepStats
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import Assembler, Queued
from outdraft.engine.engine import Engine
from outdraft.engine.inputs import Prompt
from outdraft.engine.stats import StatsTotal

PHASES = ("draft", "verify", "sample", "host")  # of a step
TURN_S = 0.1  # of one run before the others have theirs


class EngineRun:
    """Requests that an engine completes, step by step.

    When it is over it aborts those that are left; a run that is given up earlier is to be closed.

    Attributes:
        num_left: requests that have not finished.
        finished: outputs of the others, in the order of their ends.
        stats: of the steps, with those of other runs if they share it, and
        elapsed_s: time inside of the steps.
        decode_stats, decode_s: of the steps after the one that brought the first tokens.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Iterable[Queued],
        on_output: Callable[[RequestOutput], object] = lambda output: None,
        *,
        num_together: int = 1,
        stats: StatsTotal | None = None,
    ) -> None:
        """
        Args:
            on_output: called with each output that grew; its time is not counted.
            num_together: the run is over when fewer requests are left.
            stats: to which the steps are added.
        """
        queue = list(requests)
        self.num_left, self._num_together = len(queue), num_together
        self.finished: list[RequestOutput] = []
        self.elapsed_s = self.decode_s = 0.0
        self._newest: RequestOutput | None = None
        self._num_first = 0
        self._on_output = on_output
        self._steps = Assembler(engine).run(queue)
        self._engine, self._emitted_before = engine, engine.stats.num_emitted
        self.stats, self.decode_stats = stats or StatsTotal(), StatsTotal()
        engine.on_step = self._count

    @property
    def is_over(self) -> bool:
        return self.num_left < self._num_together

    @property
    def output(self) -> RequestOutput:
        """The output that grew last: of one request its own."""
        assert self._newest is not None
        return self._newest

    @property
    def token_ids(self) -> list[int]:
        """Tokens of `output`."""
        return self.output.outputs[0].token_ids

    @property
    def origins(self) -> Sequence[str]:
        """Sources of `token_ids`."""
        return self.output.outputs[0].origins

    @property
    def num_decoded(self) -> int:
        """Tokens of `output` after its first ones."""
        return len(self.token_ids) - self._num_first

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all requests."""
        return (self._engine.stats.num_emitted - self._emitted_before) / self.elapsed_s

    def advance(self, seconds: float = math.inf) -> None:
        """Step until the steps have taken `seconds`, or until the run is over.

        Raises:
            GenerationError: a request failed.
        """
        passed_s = 0.0
        while not self.is_over and passed_s < seconds:
            started_s = perf_counter()
            outputs = next(self._steps)
            step_s = perf_counter() - started_s
            passed_s += step_s
            if outputs and self._newest is not None:
                self.decode_s += step_s
            for output in outputs:
                if self._newest is None:
                    self._num_first = len(output.outputs[0].token_ids)
                self._newest = output
                self._on_output(output)
                if output.error is not None:
                    raise GenerationError(output.error)
                if output.finished:
                    self.num_left -= 1
                    self.finished.append(output)
        self.elapsed_s += passed_s
        if self.is_over:
            self.close()

    def close(self) -> None:
        """Abort what is left."""
        self._engine.on_step = None
        self._steps.close()

    def _count(self, step: StepStats) -> None:
        self.stats.add(step)
        if self._newest is not None:
            self.decode_stats.add(step)


def complete_alone(
    engine: Engine,
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    on_output: Callable[[RequestOutput], object] = lambda output: None,
) -> EngineRun:
    """Complete one prompt to its end. An exception, Ctrl-C included, aborts the request.

    Raises:
        RequestError: it can never run.
        GenerationError: it failed while it ran.
    """
    with closing(EngineRun(engine, [(request_id, prompt, params, 0)], on_output)) as run:
        run.advance()
    return run


def queued(requests: Sequence[BenchRequest], params: SamplingParams) -> list[Queued]:
    """Requests as an engine takes them: each with its own length and prediction, else `params`."""
    own = [
        replace(params, max_tokens=request.max_tokens, prediction=request.prediction)
        for request in requests
    ]
    pairs = zip(requests, own, strict=True)
    return [(str(i), request.prompt, one, 0) for i, (request, one) in enumerate(pairs)]


def take_turns(
    runs: Mapping[str, EngineRun], number: int, on_over: Callable[[str], object] = lambda name: None
) -> None:
    """Advance all runs in turn until each is over, so that drift of the machine hits all alike.

    A run finds the caches as the one before left them, and one that always followed the heaviest
    would look slower than it is. So each time around the order is drawn anew.

    Args:
        number: of the round, from which all of its orders follow.
        on_over: called with the name of each run that is over.
    """
    order, left = Random(number), list(runs)
    while left:
        order.shuffle(left)
        for name in left:
            runs[name].advance(TURN_S)
            if runs[name].is_over:
                on_over(name)
        left = [name for name in left if not runs[name].is_over]
