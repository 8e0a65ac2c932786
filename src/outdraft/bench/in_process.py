"""Requests run by an engine in this process: one batch, timed, with what its steps came to."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from outdraft.bench.metrics import SpecCounters, acceptance_report
from outdraft.bench.workloads import BenchRequest
from outdraft.core.errors import CapacityError, GenerationError
from outdraft.core.jit import working_seconds
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembler import Assembler
from outdraft.engine.engine import Engine
from outdraft.engine.prompts import EncodedPrompt
from outdraft.engine.stats import StatsTotal

_Queued = tuple[str, EncodedPrompt, SamplingParams]  # arguments of Assembler.add_request


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """How every request of a benchmark is sampled."""

    temperature: float = 0.0
    ignore_eos: bool = False
    detokenize: bool = True

    def params(self, request: BenchRequest) -> SamplingParams:
        return SamplingParams(
            temperature=self.temperature,
            ignore_eos=self.ignore_eos,
            detokenize=self.detokenize,
            max_tokens=request.max_tokens,
            prediction=request.prediction,
        )


@dataclass(frozen=True, slots=True)
class Batch:
    """What became of some requests that were queued at once.

    Attributes:
        outputs: of those that finished, in the order they did.
        num_unfinished: requests that the deadline ended.
    """

    outputs: list[RequestOutput]
    num_unfinished: int
    elapsed_s: float

    @property
    def num_input_tokens(self) -> int:
        return sum(len(output.prompt_token_ids) for output in self.outputs)

    @property
    def num_output_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)


def run_batch(
    engine: Engine,
    requests: Sequence[BenchRequest],
    generation: Generation,
    deadline_s: float,
    on_done: Callable[[RequestOutput], object] = lambda output: None,
) -> Batch:
    """Queue everything, as fast as there is room, and step until nothing is left to do.

    Args:
        deadline_s: of time.monotonic; what runs then is aborted.

    Raises:
        RequestError: a request could never run; found before the time is taken.
        GenerationError: one failed while it ran.
    """
    queue: deque[_Queued] = deque()
    for number, request in enumerate(requests):
        params = generation.params(request)
        queue.append((str(number), engine.check_request(request.prompt, params), params))
    assembler = Assembler(engine)
    outputs: list[RequestOutput] = []
    started_s = working_seconds()
    try:
        while (queue or engine.has_work) and time.monotonic() < deadline_s:
            _feed(assembler, queue)
            for output in assembler.step():
                if output.error is not None:
                    raise GenerationError(output.error)
                if output.finished:
                    outputs.append(output)
                    on_done(output)
        elapsed_s = working_seconds() - started_s
    finally:
        for number in range(len(requests)):
            assembler.abort(str(number))
    return Batch(outputs, len(requests) - len(outputs), elapsed_s)


def stats_report(total: StatsTotal) -> dict[str, Any]:
    """Acceptance, with the names of a load test, and where the time of the steps went."""
    result: dict[str, Any] = {
        "num_steps": total.num_steps,
        "phase_seconds": {
            "draft": total.draft_s,
            "verify": total.verify_s,
            "sample": total.sample_s,
            "host": total.host_s,
        },
    }
    if not total.num_drafts:
        return result
    counters = SpecCounters(
        total.num_drafts, total.num_draft_tokens, total.num_accepted_tokens, total.accepted_at
    )
    by_source = {
        str(source): {"drafted": drafted, "accepted": total.accepted_by_source[source]}
        for source, drafted in total.drafted_by_source.items()
    }
    return result | acceptance_report(counters) | {"spec_decode_tokens_by_source": by_source}


def _feed(assembler: Assembler, queue: deque[_Queued]) -> None:
    while queue:
        try:
            assembler.add_request(*queue[0])
        except CapacityError:
            return
        queue.popleft()
