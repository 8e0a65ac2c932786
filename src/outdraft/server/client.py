"""What a client of an engine, or of several, offers to a server."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from outdraft.core.errors import ConfigError, EngineDeadError
from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt, InputProcessor
from outdraft.server.messages import Command, EngineFailed, EngineInfo, Loading, Report

OnLoading = Callable[[Loading], None]
Result = TypeVar("Result")


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


class EngineLink(Protocol):
    """The way to an engine and back."""

    async def started(self, on_loading: OnLoading) -> EngineInfo:
        """Wait until the engine is ready.

        Raises:
            ConfigError: its configuration is to blame that it never will be.
            EngineDeadError: something else is.
        """
        ...

    async def receive(self) -> list[Report]:
        """What the engine tells next."""
        ...

    def send(self, command: Command) -> None:
        """Never waits: the engine reads commands between two steps."""
        ...

    async def while_alive(self, work: Coroutine[Any, Any, Result], told: str) -> Result:
        """What some work results in. Raises EngineDeadError, `told`, if the engine ends first."""
        ...

    def end(self) -> None:
        """End the engine if it still runs, and close everything."""
        ...


async def first_info(
    receive: Callable[[], Awaitable[list[Report]]], on_loading: OnLoading
) -> EngineInfo:
    """Read reports until the one that says that the engine is ready. Raises as `started`."""
    while True:
        for report in await receive():
            if isinstance(report, Loading):
                on_loading(report)
            elif isinstance(report, EngineInfo):
                return report
            elif isinstance(report, EngineFailed):
                kind = ConfigError if report.kind == "config" else EngineDeadError
                raise kind(report.message)


async def unless_dead(
    work: Coroutine[Any, Any, Result], death: Coroutine[Any, Any, str], told: str
) -> Result:
    """What some work results in.

    Raises:
        EngineDeadError: `death` came first; what it returns says how the engine ended.
    """
    working, dying = asyncio.create_task(work), asyncio.create_task(death)
    try:
        await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise EngineDeadError(f"{told}: {dying.result()}", dying.result())
        return working.result()
    finally:
        working.cancel()
        dying.cancel()
        await asyncio.gather(working, dying, return_exceptions=True)
