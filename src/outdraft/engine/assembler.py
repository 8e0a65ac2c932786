"""Whole outputs from an engine in this process."""

from collections import deque
from collections.abc import Generator, Iterable
from contextlib import suppress

from outdraft.core.errors import CapacityError, GenerationError
from outdraft.core.outputs import RequestDelta, RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import RequestAssembly
from outdraft.engine.engine import Engine
from outdraft.engine.inputs import Prompt

Queued = tuple[str, Prompt, SamplingParams, int]  # arguments of Assembler.add_request


class Assembler:
    """Adds requests to an engine and assembles what its steps bring them.

    As little safe to use from several threads as the engine. Deltas of requests that others added
    are dropped.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._assemblies: dict[str, RequestAssembly] = {}

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> None:
        """As Engine.add_request."""
        inputs = self._engine.inputs
        encoded = inputs.encoded(prompt)
        self._engine.add_request(request_id, encoded, params, priority)
        self._assemblies[request_id] = RequestAssembly(request_id, encoded, params, inputs)

    def run(self, requests: Iterable[Queued]) -> Generator[list[RequestOutput]]:
        """Queue requests, as fast as there is room, and step until nothing is left to do.

        Each step gives what `step` does. The requests end with the generator, if not before.
        """
        queue = deque(requests)
        request_ids = [request_id for request_id, *_ in queue]
        try:
            while queue or self._engine.has_work:
                with suppress(CapacityError):
                    while queue:
                        self.add_request(*queue[0])
                        queue.popleft()
                yield self.step()
        finally:
            for request_id in request_ids:
                self.abort(request_id)

    def step(self) -> list[RequestOutput]:
        """Step the engine; the outputs that grew.

        An output is the same object from step to step and grows: copy it to keep it.
        """
        deltas = self._engine.step()
        outputs = [self._grow(delta) for delta in deltas if delta.request_id in self._assemblies]
        for output in outputs:  # last: had this failed, `started_requests` would name them
            if output.finished:
                del self._assemblies[output.request_id]
        return outputs

    def started_requests(self) -> list[str]:
        """Ids of the requests that run, or whose last output `step` has not returned."""
        started = set(self._engine.running_requests())
        return [
            request_id
            for request_id in self._assemblies
            if request_id in started or not self._engine.is_live(request_id)
        ]

    def abort(self, request_id: str) -> None:
        """End a request early and give back all it holds; unknown ones are ignored."""
        self._assemblies.pop(request_id, None)
        self._engine.abort(request_id)

    def _grow(self, delta: RequestDelta) -> RequestOutput:
        assembly = self._assemblies[delta.request_id]
        _, stopped = assembly.add(delta)
        for completion in stopped:
            num_tokens = len(completion.token_ids)
            self._engine.stop_sequence(delta.request_id, completion.index, num_tokens)
        return assembly.output


def checked(output: RequestOutput | None) -> RequestOutput:
    """An output that has ended. Raises GenerationError if its request failed."""
    assert output is not None
    if output.error is not None:
        raise GenerationError(output.error)
    return output
