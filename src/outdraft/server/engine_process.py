"""Starts the engine process, and knows the way to it and back."""

import asyncio
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec
import zmq
import zmq.asyncio

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError, EngineDeadError
from outdraft.server.messages import Assignment, Command, EngineInfo, Failed, Loading, Report

DEATH_POLL_S = 0.1
GOODBYE_S = 0.2  # for reports that were under way when the process ended

_HINTS = {signal.SIGKILL: ", as the kernel does when memory runs out"}

OnLoading = Callable[[Loading], None]
Result = TypeVar("Result")


class EngineProcess:
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
        self._decoder = msgspec.msgpack.Decoder(list[Report])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outdraft.server.core_process"],
            stdin=subprocess.PIPE,
            env=dict(environ),
        )
        assert self._process.stdin is not None
        pickle.dump(Assignment(config, commands, reports, log_level), self._process.stdin)
        self._process.stdin.flush()

    async def started(self, on_loading: OnLoading) -> EngineInfo:
        """Wait until the engine is ready.

        Raises:
            ConfigError: its configuration is to blame that it never will be.
            EngineDeadError: something else is.
        """
        return await self.while_alive(self._info(on_loading), "the engine died while it started")

    async def _info(self, on_loading: OnLoading) -> EngineInfo:
        while True:
            for report in await self.receive():
                if isinstance(report, Loading):
                    on_loading(report)
                elif isinstance(report, EngineInfo):
                    self._folder.cleanup()  # both ends are connected
                    return report
                elif isinstance(report, Failed):
                    kind = ConfigError if report.kind == "config" else EngineDeadError
                    raise kind(report.message)

    async def receive(self) -> list[Report]:
        """What the engine tells next."""
        return self._decoder.decode(await self._reports.recv())

    def send(self, command: Command) -> None:
        """Never waits: the engine reads commands between two steps."""
        self._commands.send(msgspec.msgpack.encode(command), zmq.NOBLOCK)

    async def while_alive(self, work: Coroutine[Any, Any, Result], told: str) -> Result:
        """What some work results in. Raises EngineDeadError, `told`, if the process ends first."""
        working = asyncio.create_task(work)
        death = asyncio.create_task(self._death())
        try:
            await asyncio.wait({working, death}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise EngineDeadError(f"{told}: {death.result()}", death.result())
            return working.result()
        finally:
            working.cancel()
            death.cancel()
            await asyncio.gather(working, death, return_exceptions=True)

    async def _death(self) -> str:
        """Wait for the end of the process, and of what it had to tell; how it ended, in words."""
        while (code := self._process.poll()) is None:
            await asyncio.sleep(DEATH_POLL_S)
        await asyncio.sleep(GOODBYE_S)
        return ending(code)

    def end(self) -> None:
        """Kill the process if it still runs, and close everything."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._commands.close()
        self._reports.close()
        self._context.term()
        self._folder.cleanup()


def ending(code: int) -> str:
    """A process's exit code, or the signal that ended it, in words; `code` as in subprocess."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"its process was ended by signal {-code}"
    return f"its process was ended by {number.name}{_HINTS.get(number, '')}"
