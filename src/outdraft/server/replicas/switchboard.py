"""Between a front end and replicas elsewhere: a switchboard here, a relay there.

A relay passes messages on between an engine process beside it and the front end. It also reports
that the engine lives, and how its process ended.
"""

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial

import msgspec
import zmq
import zmq.asyncio
from msgspec import Struct
from msgspec.structs import replace

from outdraft.core.errors import EngineDeadError
from outdraft.core.process import Silence
from outdraft.server.client import REPORTS, EngineLink, EngineProcess, first_ended
from outdraft.server.messages import EngineInfo, Progress, Report

HELLO, LEAVING = b"hello", b"leaving"  # relay to front end
FRAME, BEAT, END = b"frame", b"beat", b"end"  # both ways: reports or commands; signs of life

BEAT_S = 0.5
FAREWELL_S = 1.0  # for a relay's last message to be sent

Address = tuple[str, bytes]  # of the front end for relays: the URL, and its public key
Send = Callable[[bytes, bytes], object]  # a kind and a body, to the other end; never waits


class Beat(Struct, frozen=True):
    """A sign of life, every BEAT_S seconds."""

    clock_s: float  # monotonic clock of the sender's machine
    num_sent: int  # frames so far; a receiver that has fewer has lost some
    num_requests: int  # that the front end has open at the replica


class Line:
    """One end of the way between a front end and a relay. It counts what passes."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self._num_sent = self._num_received = 0
        self._has_heard = False  # since the last beat
        self._silence = Silence(BEAT_S)

    def pass_on(self, frame: bytes) -> None:
        self._num_sent += 1
        self.send(FRAME, frame)

    def beat(self, num_requests: int = 0) -> float:
        """Send a sign of life, every BEAT_S seconds; return seconds of silence."""
        beat = Beat(time.monotonic(), self._num_sent, num_requests)
        self.send(BEAT, msgspec.msgpack.encode(beat))
        has_heard, self._has_heard = self._has_heard, False
        return self._silence.look(is_broken=has_heard)

    def hear(self, kind: bytes, body: bytes) -> tuple[Beat, int] | None:
        """Count a message; of a sign of life return what it says, and how many frames were lost."""
        self._has_heard = True
        self._num_received += kind == FRAME
        if kind != BEAT:
            return None
        beat = msgspec.msgpack.decode(body, type=Beat)
        return beat, beat.num_sent - self._num_received


class RemoteEngine(EngineLink):
    """The way to the engine of a replica.

    `node`: address of its machine.
    """

    def __init__(self, name: str, node: str, send: Send, on_end: Callable[[], object]) -> None:
        self.name = name
        self.node = node
        self.place = f" on {node}"
        self.is_leaving = asyncio.Event()
        self.num_requests: Callable[[], int] = lambda: 0  # that are open at the replica
        self._line = Line(send)
        self._on_end = on_end
        self._is_ended = False
        self._reports: asyncio.Queue[bytes] = asyncio.Queue()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._ahead_s = math.inf  # by how much this machine's clock is ahead, and the way's time

    async def receive(self) -> list[Report]:
        """Wait for the engine's next reports; their times are of this machine's clock."""
        return [self._in_own_time(report) for report in await super().receive()]

    async def receive_frame(self) -> bytes:
        return await self._reports.get()

    def send_frame(self, command: bytes) -> None:
        self._line.pass_on(command)

    async def death(self) -> str:
        return await asyncio.shield(self._lost)

    def end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._line.send(END, b"")
            self._on_end()
            self._lose("its front end has ended it")

    def hear(self, kind: bytes, body: bytes) -> None:
        """A message of the relay."""
        if (heard := self._line.hear(kind, body)) is not None:
            beat, num_lost = heard
            # The way takes time, once more and once less: the fastest message is the most exact.
            self._ahead_s = min(self._ahead_s, time.monotonic() - beat.clock_s)
            if num_lost:
                self._lose(f"{num_lost} of its reports were lost")
        elif kind == FRAME:
            self._reports.put_nowait(body)
        elif kind == END:
            self._lose(body.decode())
        elif kind == LEAVING:
            self.is_leaving.set()

    def beat(self, lost_after_s: float) -> None:
        """A sign of life to the relay; lose it if there was none from it for too long."""
        if self._line.beat(self.num_requests()) > lost_after_s:
            self._lose(f"nothing was heard of {self.node} for {lost_after_s:g} s")

    def _lose(self, cause: str) -> None:
        """The replica is gone; `cause`: in words."""
        if not self._lost.done():
            self._lost.set_result(cause)

    def _in_own_time(self, report: Report) -> Report:
        if not isinstance(report, Progress):
            return report
        ahead_s = self._ahead_s
        return Progress(
            [
                replace(delta, first_scheduled_s=delta.first_scheduled_s + ahead_s)
                for delta in report.deltas
            ]
        )


class Switchboard:
    """The socket that relays call; `run` has to run beside it.

    Args:
        host: address of this machine that the relays' machines can reach.
        port: 0: any that is free.
        lost_after_s: how long a relay may be silent before its replica counts as lost.
    """

    def __init__(self, host: str, port: int, lost_after_s: float) -> None:
        self._lost_after_s = lost_after_s
        self._engines: dict[bytes, RemoteEngine] = {}
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.linger = int(BEAT_S * 1000)
        self._socket.ipv6 = ":" in host
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a relay whose connection broke calls anew
        public_key, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_publickey = public_key
        self._socket.curve_server = True
        shown = f"[{host}]" if ":" in host else host
        bound = self._socket.bind(f"tcp://{shown}:{port or '*'}")
        self.address: Address = bound.addr, public_key

    async def run(self, on_arrival: Callable[[RemoteEngine], None]) -> None:
        """Until it is cancelled.

        `on_arrival` gets the engine of each relay that says hello, while it still loads.
        """
        tasks = map(asyncio.create_task, (self._hear(on_arrival), self._beat()))
        done = await first_ended(*tasks)
        done.pop().result()

    def close(self) -> None:
        """End all engines that are left."""
        for engine in list(self._engines.values()):
            engine.end()
        self._socket.close()
        self._context.term()

    async def _hear(self, on_arrival: Callable[[RemoteEngine], None]) -> None:
        while True:
            name, kind, body = await self._socket.recv_multipart()
            if kind == HELLO and name not in self._engines:
                send, forget = partial(self._send, name), partial(self._engines.pop, name)
                engine = RemoteEngine(name.decode(), body.decode(), send, forget)
                self._engines[name] = engine
                on_arrival(engine)
            elif (engine := self._engines.get(name)) is not None:
                engine.hear(kind, body)
            elif kind != END:
                self._send(name, END, b"")  # it counts as lost: a new one has to come

    def _send(self, name: bytes, kind: bytes, body: bytes) -> None:
        # Without a limit to what is queued, it is done at once.
        self._socket.send_multipart([name, kind, body], zmq.NOBLOCK)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for engine in list(self._engines.values()):
                engine.beat(self._lost_after_s)


class FrontEndLostError(Exception):
    """The front end was not heard of for too long, or has lost commands."""


class Relay:
    """The relay of one engine process, which it ends when it ends itself.

    Args:
        name: of the replica; no other one has it, at no time.
        node: address of this machine, for people.
        lost_after_s: how long the front end may be silent.

    Attributes:
        num_requests: that the front end has open here, as it said last.
        ready: done when the engine is ready; an EngineDeadError: `run` has ended instead.
        ended: set when `run` has ended.
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
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        url, self._socket.curve_serverkey = address
        self._socket.connect(url)
        self._line = Line(self._send)
        self.num_requests = 0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = asyncio.Event()

    async def run(self) -> None:
        """Until the front end says so, or the engine dies.

        Raises:
            FrontEndLostError: the front end is silent.
        """
        cause = "its relay failed"
        try:
            self._send(HELLO, self._node.encode())
            await self._engine.while_alive(self._relay(), "the engine process has died")
            cause = "it was told to end"
        except EngineDeadError as error:
            cause = error.ended_by or str(error)
        except FrontEndLostError as error:
            cause = str(error)
            raise
        finally:
            if not self.ready.done():
                self.ready.set_exception(EngineDeadError(f"the engine did not start: {cause}"))
            self.ended.set()
            self._engine.end()
            self._send(END, cause.encode())
            self._socket.close()
            self._context.term()

    async def leave(self) -> None:
        """Ask for no more requests, and wait until those that run have ended."""
        if not self.ended.is_set():
            self._send(LEAVING, b"")
            await self.ended.wait()

    async def _relay(self) -> None:
        """Everything at once, until the first part of it ends."""
        parts = (self._beat(), self._pass_reports(), self._pass_commands())
        done = await first_ended(*map(asyncio.create_task, parts))
        done.pop().result()

    async def _pass_reports(self) -> None:
        while True:
            frame = await self._engine.receive_frame()
            self._line.pass_on(frame)
            if self.ready.done():
                continue
            if any(isinstance(report, EngineInfo) for report in REPORTS.decode(frame)):
                self.ready.set_result(None)

    async def _pass_commands(self) -> None:
        while True:
            kind, body = await self._socket.recv_multipart()
            if (heard := self._line.hear(kind, body)) is not None:
                beat, num_lost = heard
                self.num_requests = beat.num_requests
                if num_lost:
                    raise FrontEndLostError(f"{num_lost} commands of the front end were lost")
            elif kind == FRAME:
                self._engine.send_frame(body)
            elif kind == END:
                return

    async def _beat(self) -> None:
        while (silent_s := self._line.beat()) <= self._lost_after_s:
            await asyncio.sleep(BEAT_S)
        raise FrontEndLostError(f"the front end was silent for {silent_s:.0f} s")

    def _send(self, kind: bytes, body: bytes) -> None:
        # Without a limit to what is queued, it is done at once.
        self._socket.send_multipart([kind, body], zmq.NOBLOCK)
