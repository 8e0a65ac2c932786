"""What the routes know of the engine: a client that streams requests. See process_client.py."""

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from outdraft.core.outputs import DraftTrace, Logprob, RequestOutput, TokenOrigin
from outdraft.core.sampling import SamplingParams
from outdraft.engine.prompts import EncodedPrompt
from outdraft.server.messages import EngineInfo, Steps


@dataclass(frozen=True, slots=True)
class TextDelta:
    """What one sequence gained.

    `text` may lag behind `token_ids`: it is held back while a character is incomplete or a stop
    string may begin in it. The last delta of a sequence has its finish_reason.
    """

    index: int
    text: str
    token_ids: list[int]
    origins: list[TokenOrigin]
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str | None
    stop_reason: int | str | None
    steps: list[DraftTrace] | None


@dataclass(frozen=True, slots=True)
class Update:
    """A request grew.

    Attributes:
        output: the whole of it so far: the same object each time, not to be kept or changed.
        deltas: of the sequences that grew.
    """

    output: RequestOutput
    deltas: list[TextDelta]


class EngineClient(Protocol):
    """An engine somewhere else."""

    @property
    def info(self) -> EngineInfo: ...

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
    ) -> AsyncIterator[Update]:
        """Stream a request. The last update's output is finished.

        Closing the iterator early aborts the request.

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

    def watch(self, on_steps: Callable[[Steps], None]) -> None:
        """Have a function called with the engine's statistics, several times a second at most."""
        ...
