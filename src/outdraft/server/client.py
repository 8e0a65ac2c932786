"""What the routes know of the engine: a client that streams requests. See process_client.py."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Update:
    """A request grew.

    Attributes:
        output: the whole of it so far: the same object each time, not to be kept or changed.
        deltas: what each of the sequences that grew gained. `text` may lag behind `token_ids`: it
            is held back while a character is incomplete or a stop string may begin in it. The last
            delta of a sequence has its finish_reason.
    """

    output: RequestOutput
    deltas: list[CompletionOutput]


class Unread:
    """Between an output that grows and its reader, however seldom that one comes for it."""

    def __init__(self, output: RequestOutput) -> None:
        self._output = output
        self._seen = [(0, 0, 0, False)] * len(output.outputs)

    def take(self) -> Update:
        """All that came since it was asked last."""
        deltas: list[CompletionOutput] = []
        for place, one in enumerate(self._output.outputs):
            tokens, characters, steps, has_end = self._seen[place]
            if tokens == len(one.token_ids) and has_end == (one.finish_reason is not None):
                continue
            delta = replace(
                one,
                text=one.text[characters:],
                token_ids=one.token_ids[tokens:],
                origins=one.origins[tokens:],
                logprobs=_behind(tokens, one.logprobs),
                trace=_behind(steps, one.trace),
            )
            deltas.append(delta)
            steps = len(one.trace or ())
            is_over = one.finish_reason is not None
            self._seen[place] = len(one.token_ids), len(one.text), steps, is_over
        return Update(self._output, deltas)


def _behind(count: int, items: list[Item] | None) -> list[Item] | None:
    return None if items is None else items[count:]


class EngineClient(Protocol):
    """An engine somewhere else."""

    @property
    def is_alive(self) -> bool:
        """False once the engine has died; it never comes back as the same object."""
        ...

    @property
    def ended_by(self) -> str | None:
        """The signal or exit code of a dead engine's process, in words; None: not known."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests that were accepted and have not ended."""
        ...

    def generate(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0
    ) -> AsyncGenerator[Update]:
        """Stream a request. The last update's output is finished.

        Closing the generator early aborts the request.

        Raises:
            RequestError, CapacityError: it was not accepted.
            GenerationError: it failed while it ran; others go on.
            EngineDeadError: the engine died, or a step failed, while it ran.
        """
        ...

    async def profile(self, path: str | None) -> str | None:
        """Begin a trace of the engine's steps; without a path: end it, and write it.

        Returns why that could not be done, None if it was.

        Raises:
            EngineDeadError: the engine is dead, or died meanwhile.
        """
        ...
