"""Starts the engine process, and knows the way to it and back."""

import asyncio
import pickle
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import zmq
import zmq.asyncio

from outdraft.config.engine import EngineConfig
from outdraft.core.process import ending
from outdraft.server.client import EngineLink, OnLoading
from outdraft.server.messages import Assignment, EngineInfo

DEATH_POLL_S = 0.1
GOODBYE_S = 0.2  # for reports that were under way when the process ended


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
        self._process = subprocess.Popen(
            [sys.executable, "-m", "outdraft.server.core_process"],
            stdin=subprocess.PIPE,
            env=dict(environ),
        )
        assert self._process.stdin is not None
        self._timeout_s = config.parallel.rank_timeout_s
        pickle.dump(Assignment(config, commands, reports, log_level), self._process.stdin)
        self._process.stdin.flush()

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
        stopped_s = 0.0
        while (code := self._process.poll()) is None:
            await asyncio.sleep(DEATH_POLL_S)
            stopped_s = stopped_s + DEATH_POLL_S if self._is_stopped() else 0.0
            if stopped_s > self._timeout_s:
                return f"its process was stopped for {self._timeout_s:g} s"
        await asyncio.sleep(GOODBYE_S)
        return ending(code)

    def _is_stopped(self) -> bool:
        with suppress(psutil.Error):  # it has ended
            return psutil.Process(self._process.pid).status() == psutil.STATUS_STOPPED
        return False

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._commands.close()
        self._reports.close()
        self._context.term()
        self._folder.cleanup()
