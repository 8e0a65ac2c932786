"""Protocols between a server and its engines: the client that it asks, and the way to an engine."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from outdraft.core.errors import ConfigError, EngineDeadError
from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt, InputProcessor
from outdraft.server.messages import Command, EngineFailed, EngineInfo, Loading, Report

OnLoading = Callable[[Loading], None]
Result = TypeVar("Result")
_REPORTS = msgspec.msgpack.Decoder(list[Report])


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
        """True while requests are taken."""
        ...

    @property
    def ended_by(self) -> str | None:
        """The cause of the engine's end, in words; None: it runs, or the cause is not known."""
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


class EngineLink(ABC):
    """The way to an engine elsewhere, in another process or on another machine, and back."""

    place: str = ""  # of the engine, for messages

    @abstractmethod
    async def receive_frame(self) -> bytes:
        """Wait for the engine's next reports, in msgpack."""

    @abstractmethod
    def send_frame(self, command: bytes) -> None:
        """Send a command, in msgpack. Never waits: the engine reads them between two steps."""

    @abstractmethod
    async def death(self) -> str:
        """Wait until the engine has ended; how it did, in words."""

    @abstractmethod
    def end(self) -> None:
        """End the engine if it still runs, and close everything."""

    async def receive(self) -> list[Report]:
        return _REPORTS.decode(await self.receive_frame())

    def send(self, command: Command) -> None:
        self.send_frame(msgspec.msgpack.encode(command))

    async def started(self, on_loading: OnLoading) -> EngineInfo:
        """Wait until the engine is ready.

        Raises:
            ConfigError: its configuration is to blame that it never will be.
            EngineDeadError: something else is.
        """

        async def first_info() -> EngineInfo:
            while True:
                for report in await self.receive():
                    if isinstance(report, Loading):
                        on_loading(report)
                    elif isinstance(report, EngineInfo):
                        return report
                    elif isinstance(report, EngineFailed):
                        kind = ConfigError if report.kind == "config" else EngineDeadError
                        raise kind(report.message)

        return await self.while_alive(first_info(), f"the engine{self.place} died while it started")

    async def while_alive(self, work: Coroutine[Any, Any, Result], message: str) -> Result:
        """The result of some work. Raises EngineDeadError if the engine ends first."""
        working, dying = asyncio.create_task(work), asyncio.create_task(self.death())
        try:
            await asyncio.wait({working, dying}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EngineDeadError(f"{message}: {dying.result()}", dying.result())
            return working.result()
        finally:
            working.cancel()
            dying.cancel()
            await asyncio.gather(working, dying, return_exceptions=True)
