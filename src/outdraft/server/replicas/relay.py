"""Passes messages on between an engine process beside it and a front end elsewhere.

The relay also reports that the engine lives, and how its process ended.
"""

import asyncio
import time

import msgspec
import zmq
import zmq.asyncio

from outdraft.core.errors import EngineDeadError
from outdraft.server.engine_process import EngineProcess
from outdraft.server.messages import EngineInfo, Report
from outdraft.server.replicas.switchboard import (
    BEAT,
    BEAT_S,
    COMMAND,
    END,
    GONE,
    HELLO,
    LEAVING,
    REPORTS,
    Address,
    Beat,
    Hello,
    Silence,
)

FAREWELL_S = 1.0  # for the last message to be sent


class FrontEndLostError(Exception):
    """The front end was not heard of for too long, or has lost commands."""


class Relay:
    """The relay of one engine process, which it ends when it ends itself.

    Args:
        name: of the replica; no other one has it, at no time.
        node: address of this machine, for people.
        lost_after_s: how long the front end may be silent.
    """

    def __init__(
        self, engine: EngineProcess, address: Address, name: str, node: str, lost_after_s: float
    ) -> None:
        self._engine = engine
        self._node = node
        self._lost_after_s = lost_after_s
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.ROUTING_ID, name.encode())
        self._socket.set_hwm(0)
        self._socket.linger = int(FAREWELL_S * 1000)
        own_public, own_secret = zmq.curve_keypair()
        self._socket.curve_publickey, self._socket.curve_secretkey = own_public, own_secret
        self._socket.curve_serverkey = address.public_key
        self._socket.connect(address.url)
        self._num_reports = 0
        self._num_commands = 0
        self.num_requests = 0  # that the front end has open here, as it said last
        self._silence = Silence()
        self._reports = msgspec.msgpack.Decoder(list[Report])
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()

    async def ready(self) -> EngineInfo:
        """Wait until the engine is. Raises EngineDeadError: `run` has ended instead."""
        return await self._ready

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def run(self) -> None:
        """Until the front end says so, or the engine dies.

        Raises:
            FrontEndLostError: the front end is silent.
        """
        cause = "its relay failed"
        try:
            await self._send(HELLO, Hello(self._node, time.monotonic()))
            await self._engine.while_alive(self._relay(), "the engine process has died")
            cause = "it was told to end"
        except EngineDeadError as error:
            cause = error.ended_by or str(error)
        except FrontEndLostError as error:
            cause = str(error)
            raise
        finally:
            if not self._ready.done():
                self._ready.set_exception(EngineDeadError(f"the engine did not start: {cause}"))
            self._ended.set()
            self._engine.end()
            # Without a limit to what is queued, it is done at once.
            self._socket.send_multipart([GONE, cause.encode()], zmq.NOBLOCK)
            self._socket.close()
            self._context.term()

    async def leave(self) -> None:
        """Ask for no more requests, and wait until those that run have ended."""
        if not self.has_ended:
            await self._send(LEAVING, None)
            await self._ended.wait()

    async def _relay(self) -> None:
        """Everything at once, until the first part of it ends."""
        parts = [
            asyncio.create_task(part())
            for part in (self._pass_reports, self._pass_commands, self._beat)
        ]
        try:
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            for part in parts:
                part.cancel()
            await asyncio.gather(*parts, return_exceptions=True)

    async def _pass_reports(self) -> None:
        while True:
            frame = await self._engine.receive_frame()
            self._num_reports += 1
            await self._socket.send_multipart([REPORTS, frame])
            if not self._ready.done():
                for report in self._reports.decode(frame):
                    if isinstance(report, EngineInfo):
                        self._ready.set_result(report)

    async def _pass_commands(self) -> None:
        while True:
            kind, body = await self._socket.recv_multipart()
            self._silence.heard()
            if kind == COMMAND:
                self._num_commands += 1
                self._engine.send_frame(body)
            elif kind == BEAT:
                beat = msgspec.msgpack.decode(body, type=Beat)
                self.num_requests = beat.num_requests
                if beat.num_sent != self._num_commands:
                    missing = beat.num_sent - self._num_commands
                    raise FrontEndLostError(f"{missing} commands of the front end were lost")
            elif kind == END:
                return

    async def _beat(self) -> None:
        while True:
            await self._send(BEAT, Beat(time.monotonic(), self._num_reports))
            await asyncio.sleep(BEAT_S)
            silent_s = self._silence.passed(time.monotonic())
            if silent_s > self._lost_after_s:
                raise FrontEndLostError(f"the front end was silent for {silent_s:.0f} s")

    async def _send(self, kind: bytes, message: msgspec.Struct | None) -> None:
        await self._socket.send_multipart([kind, msgspec.msgpack.encode(message)])
