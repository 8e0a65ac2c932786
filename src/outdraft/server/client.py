"""What a client of an engine, or of several, offers to a server."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Protocol

from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt, InputProcessor
from outdraft.server.messages import EngineInfo

@dataclass(frozen=True, slots=True)
class Update:
    """A request grew; or it was accepted, and has nothing yet.

    Attributes:
        output: the whole of it so far: the same object each time, not to be kept or changed.
        deltas: what each of the sequences that grew gained. `text` may lag behind `token_ids`: it
            is held back while a character is incomplete or a stop string may begin in it. The last
            delta of a sequence has its finish_reason.
    """

    output: RequestOutput
    deltas: list[CompletionOutput]


class EngineClient(Protocol):
    """Answers requests, with one engine or with several that are alike."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def inputs(self) -> InputProcessor:
        """Checks and encodes prompts."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether requests are taken."""
        ...

    @property
    def ended_by(self) -> str | None:
        """How the engine ended, in words; None: it has not, or nobody knows."""
        ...

    @property
    def num_unfinished(self) -> int:
        """Requests that were accepted and have not ended."""
        ...

    async def run(self) -> None:
        """Has to run beside everything else; ends when there will be no engine any more."""
        ...

    def close(self, cause: str) -> None:
        """End everything; open streams get an EngineDeadError with the cause."""
        ...

    def generate(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0
    ) -> AsyncGenerator[Update]:
        """Stream a request. The first update comes when it is accepted, the last one's output is
        finished.

        Closing the generator early aborts the request.

        Raises:
            RequestError, CapacityError: it was not accepted.
            GenerationError: it failed while it ran; others go on.
            EngineDeadError: the engine died, or a step failed, while it ran; ReplicaLostError:
                there are other engines.
        """
        ...

    async def profile(self, path: str | None) -> str | None:
        """Begin a trace of the engine's steps; without a path: end it, and write it.

        Returns why that could not be done, None if it was. Raises EngineDeadError.
        """
        ...
