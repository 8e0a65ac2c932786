"""Between a front end and replicas elsewhere: a switchboard here, a relay there.

A relay passes messages on between an engine process beside it and the front end. It also reports
that the engine lives, and how its process ended.
"""

import asyncio
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec
import zmq
import zmq.asyncio
from msgspec import Struct
from msgspec.structs import replace

from outdraft.core.errors import EngineDeadError
from outdraft.server.client import EngineLink, EngineProcess, first_ended
from outdraft.server.messages import EngineInfo, Progress, Report

# Relay to front end.
HELLO, REPORTS, GONE, LEAVING = b"hello", b"reports", b"gone", b"leaving"
# Front end to relay.
COMMAND, END = b"command", b"end"
# Both ways.
BEAT = b"beat"

BEAT_S = 0.5
FAREWELL_S = 1.0  # for a relay's last message to be sent


class Hello(Struct, frozen=True):
    """The first message of a relay."""

    node: str  # the machine's address
    clock_s: float  # monotonic clock of the relay's machine


class Beat(Struct, frozen=True):
    """A sign of life, every BEAT_S seconds."""

    clock_s: float  # as in Hello
    num_sent: int  # reports or commands so far; a receiver that has fewer has lost some
    num_requests: int = 0  # that the front end has open at the replica


@dataclass(frozen=True, slots=True)
class Address:
    """The address of the front end for relays.

    Attributes:
        url: as ZeroMQ writes it, tcp://10.0.0.1:5555.
        public_key: of the front end; 40 characters.
    """

    url: str
    public_key: bytes


class Silence:
    """Measures for how long nothing was heard. Time in which the process stood hardly counts.

    A process that was stopped for a while finds its peers' messages when it goes on: it must not
    think before it has read them that they were silent.
    """

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._last_s: float | None = None

    def heard(self) -> None:
        self._silent_s = 0.0

    def passed(self, now_s: float) -> float:
        """Called every BEAT_S seconds. Seconds of silence; `now_s`: of the monotonic clock."""
        if self._last_s is not None:
            self._silent_s += min(now_s - self._last_s, 2 * BEAT_S)
        self._last_s = now_s
        return self._silent_s


Send = Callable[[bytes, bytes], None]  # a kind and a body, to one relay


class RemoteEngine(EngineLink):
    """The way to the engine of a replica."""

    def __init__(self, name: str, hello: Hello, send: Send, on_end: Callable[[], object]) -> None:
        self.name = name
        self.node = hello.node
        self.place = f" on {hello.node}"
        self.is_leaving = asyncio.Event()
        self.num_requests: Callable[[], int] = lambda: 0  # that are open at the replica
        self._send = send
        self._on_end = on_end
        self._is_ended = False
        self._reports: asyncio.Queue[bytes] = asyncio.Queue()
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._num_received = 0
        self._num_sent = 0
        self._ahead_s = math.inf  # by how much this machine's clock is ahead, and the way's time
        self._silence = Silence()
        self._set_clock(hello.clock_s)

    async def receive(self) -> list[Report]:
        """Wait for the engine's next reports; their times are of this machine's clock."""
        return [self._in_own_time(report) for report in await super().receive()]

    async def receive_frame(self) -> bytes:
        return await self._reports.get()

    def send_frame(self, command: bytes) -> None:
        self._num_sent += 1
        self._send(COMMAND, command)

    async def death(self) -> str:
        return await asyncio.shield(self._lost)

    def end(self) -> None:
        if not self._is_ended:
            self._is_ended = True
            self._send(END, b"")
            self._on_end()
            self.lose("its front end has ended it")

    def hear(self, kind: bytes, body: bytes) -> None:
        """A message of the relay."""
        self._silence.heard()
        if kind == REPORTS:
            self._num_received += 1
            self._reports.put_nowait(body)
        elif kind == BEAT:
            beat = msgspec.msgpack.decode(body, type=Beat)
            self._set_clock(beat.clock_s)
            if beat.num_sent != self._num_received:
                self.lose(f"{beat.num_sent - self._num_received} of its reports were lost")
        elif kind == GONE:
            self.lose(body.decode())
        elif kind == LEAVING:
            self.is_leaving.set()

    def beat(self, now_s: float, lost_after_s: float) -> None:
        """A sign of life to the relay; lose it if there was none from it for too long."""
        beat = Beat(now_s, self._num_sent, self.num_requests())
        self._send(BEAT, msgspec.msgpack.encode(beat))
        if self._silence.passed(now_s) > lost_after_s:
            self.lose(f"nothing was heard of {self.node} for {lost_after_s:g} s")

    def lose(self, cause: str) -> None:
        """The replica is gone; `cause`: in words."""
        if not self._lost.done():
            self._lost.set_result(cause)

    def _set_clock(self, clock_s: float) -> None:
        # The way takes time, once more and once less: the fastest message is the most exact.
        self._ahead_s = min(self._ahead_s, time.monotonic() - clock_s)

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
        self.address = Address(bound.addr, public_key)

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
                hello = msgspec.msgpack.decode(body, type=Hello)
                send, forget = partial(self._send, name), partial(self._engines.pop, name)
                engine = self._engines[name] = RemoteEngine(name.decode(), hello, send, forget)
                on_arrival(engine)
            elif (engine := self._engines.get(name)) is not None:
                engine.hear(kind, body)
            elif kind != GONE:
                self._send(name, END, b"")  # it counts as lost: a new one has to come

    def _send(self, name: bytes, kind: bytes, body: bytes) -> None:
        # Without a limit to what is queued, it is done at once.
        self._socket.send_multipart([name, kind, body], zmq.NOBLOCK)

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            for engine in list(self._engines.values()):
                engine.beat(time.monotonic(), self._lost_after_s)


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
        parts = (self._pass_reports(), self._pass_commands(), self._beat())
        done = await first_ended(*map(asyncio.create_task, parts))
        done.pop().result()

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
