"""A server's engines: the client that it asks, and the way to an engine elsewhere."""

import asyncio
import pickle
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, TypeVar

import msgspec
import zmq
import zmq.asyncio

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError, EngineDeadError
from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.core.process import ChildProcess, Silence, ending
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt, InputProcessor
from outdraft.server.messages import Command, EngineFailed, EngineInfo, Loading, Report

DEATH_POLL_S = 0.1
GOODBYE_S = 0.2  # for reports that were under way when the process ended
OnLoading = Callable[[Loading], None]
Result = TypeVar("Result")
REPORTS = msgspec.msgpack.Decoder(list[Report])


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

    info: EngineInfo
    inputs: InputProcessor  # checks and encodes prompts
    ended_by: str | None  # the cause of the engine's end; None: it runs, or that is not known

    @property
    def is_alive(self) -> bool:
        """True while requests are taken."""
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
        return REPORTS.decode(await self.receive_frame())

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
        if working not in await first_ended(working, dying):
            raise EngineDeadError(f"{message}: {dying.result()}", dying.result())
        return working.result()


async def first_ended(*tasks: asyncio.Task[Any]) -> set[asyncio.Task[Any]]:
    """Wait until one of some tasks has ended, or several have; the others are cancelled."""
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class EngineProcess(EngineLink):
    """An engine in a process of its own, and the sockets to it.

    `environ` is the whole environment of the process: OpenMP reads its settings there when the
    process begins, so they cannot be set later.
    """

    def __init__(self, config: EngineConfig, environ: Mapping[str, str], log_level: str) -> None:
        self._folder = TemporaryDirectory(prefix="outdraft-")
        folder = Path(self._folder.name)
        commands, reports = f"ipc://{folder}/commands", f"ipc://{folder}/reports"
        self._context = zmq.asyncio.Context()
        self._reports = self._context.socket(zmq.PULL)
        self._commands: zmq.Socket[bytes] = zmq.Socket(self._context, zmq.PUSH)
        for socket in (self._reports, self._commands):
            socket.set_hwm(0)
            socket.linger = 0
        self._reports.bind(reports)
        self._commands.connect(commands)  # connected, it queues what is sent too early
        assigned = pickle.dumps((config, commands, reports, log_level))
        self._process = ChildProcess("outdraft.server.core_process", assigned, environ)
        self._timeout_s = config.parallel.rank_timeout_s

    async def started(self, on_loading: OnLoading) -> EngineInfo:
        info = await super().started(on_loading)
        self._folder.cleanup()  # both ends are connected
        return info

    async def receive_frame(self) -> bytes:
        return await self._reports.recv()

    def send_frame(self, command: bytes) -> None:
        self._commands.send(command, zmq.NOBLOCK)

    async def death(self) -> str:
        """Wait for the end of the process and of its reports; how it ended, in words.

        It counts as ended when it was stopped for as long as one rank waits for another: neither
        the other ranks, which it watches, nor the relay of a replica would report that.
        """
        silence = Silence(DEATH_POLL_S)
        while (code := self._process.poll()) is None:
            await asyncio.sleep(DEATH_POLL_S)
            if silence.look(is_broken=not self._process.is_stopped) > self._timeout_s:
                return f"its process was stopped for {self._timeout_s:g} s"
        await asyncio.sleep(GOODBYE_S)
        return ending(code)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._commands.close()
        self._reports.close()
        self._context.term()
        self._folder.cleanup()
