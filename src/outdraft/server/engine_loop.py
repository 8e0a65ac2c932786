"""The life of the engine process: take commands, step, report. It never waits for a reader.

A failing step ends the requests that ran in it; the others go on. If the next one fails too, or if
a rank of several is lost, also between two steps, the process ends.

A grammar may take seconds to compile. That is done by a thread of its own; the request is added
when it is ready, and later ones pass it.
"""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from pathlib import Path
from socket import socketpair

import msgspec
import numpy as np
import zmq

from outdraft.core.errors import CapacityError, RanksError, RequestError
from outdraft.core.plan import StepStats
from outdraft.engine.async_engine import MAX_FAILED_STEPS, step_failure
from outdraft.engine.engine import Engine
from outdraft.engine.inputs import EncodedPrompt
from outdraft.server.messages import (
    Abort,
    Accepted,
    Add,
    Command,
    EndSequence,
    EngineFailed,
    Profile,
    Profiled,
    Progress,
    Refused,
    Report,
    Steps,
)

MAX_PREPARING = 64  # requests that wait for their grammars
STATISTICS_INTERVAL_S = 0.1

_logger = logging.getLogger(__name__)


class EngineLoop:
    """Steps an engine for the other end of two sockets.

    `commands` is read and `reports` written; writing must never block.
    """

    def __init__(
        self,
        engine: Engine,
        commands: zmq.Socket[bytes],
        reports: zmq.Socket[bytes],
        watched: AbstractContextManager[None] | None = None,
    ) -> None:
        """`watched`: is entered for what has to go on: steps and commands, but not for profiles."""
        self._engine = engine
        self._watched = watched or nullcontext()
        self._commands = commands
        self._reports = reports
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._compiler = ThreadPoolExecutor(1, "outdraft-grammar")
        # requests whose grammars are compiled, in this order, by their ids
        self._preparing: dict[str, tuple[Add, Future[None]]] = {}
        self._wakes, self._waker = socketpair()
        for one in (self._wakes, self._waker):
            one.setblocking(False)
        self._steps: list[StepStats] = []
        self._has_news = False  # of statistics
        self._told_s = 0.0
        self._trace: ExitStack | None = None  # closing it writes it
        engine.on_step = self._steps.append

    def run(self) -> None:
        """Run until steps fail."""
        if self._engine.ranks is not None:
            self._engine.ranks.watch(self._wake)
        with self._wakes, self._waker:
            try:
                self._run()
            except RanksError as error:
                _logger.error("%s", error)
                self._send([EngineFailed("ranks", str(error))])
            finally:
                if self._trace is not None:
                    self._trace.close()
                self._compiler.shutdown(cancel_futures=True)  # one compilation at most, of seconds

    def _run(self) -> None:
        num_failed = 0
        while True:
            self._obey()
            try:
                with self._watched:
                    deltas = self._engine.step()
                self._has_news = True
                self._send([Progress(deltas)] if deltas else [])
                num_failed = 0
            except RanksError:
                raise  # there will be no next step
            except Exception as error:
                _logger.exception("a step of the engine failed")
                num_failed += 1
                if num_failed >= MAX_FAILED_STEPS:
                    self._send([EngineFailed("engine", step_failure(error))])
                    return
                failed = self._engine.running_requests()
                for request_id in failed:
                    self._engine.abort(request_id)
                self._send([Refused(one, "engine", step_failure(error)) for one in failed])
            self._report_steps()

    def _obey(self) -> None:
        """Carry out the commands that are there, or wait for one if there is nothing else to do."""
        while True:
            self._add_prepared()
            if self._commands.poll(0):
                command = self._decoder.decode(self._commands.recv())
                with self._watched if not isinstance(command, Profile) else nullcontext():
                    self._carry_out(command)
                self._has_news = True
            elif self._engine.has_work:
                return
            else:
                self._report_steps(is_idle=True)
                if self._engine.ranks is not None:
                    self._engine.ranks.check()
                zmq.select([self._commands, self._wakes], [], [])
                with suppress(BlockingIOError):
                    self._wakes.recv(4096)

    def _carry_out(self, command: Add | Abort | EndSequence | Profile) -> None:
        match command:
            case Add() if command.params.structured is None:
                self._add(command)
            case Add():
                self._prepare(command)
            case Abort(request_id):
                if (waiting := self._preparing.pop(request_id, None)) is not None:
                    waiting[1].cancel()  # one that has begun goes on, and is not used
                self._engine.abort(request_id)
            case EndSequence(request_id, index, num_tokens):
                self._engine.stop_sequence(request_id, index, num_tokens)
            case Profile(path):
                self._send([Profiled(self._profile(path))])

    def _profile(self, path: str | None) -> str | None:
        """Begin a trace, or end one; what was wrong about that."""
        # It needs torch, which is loaded by now, but must not be when the process begins.
        from outdraft.engine.profiler import traced

        try:
            if path is None:
                if self._trace is None:
                    return "no profile is being taken"
                trace, self._trace = self._trace, None
                trace.close()
            elif self._trace is not None:
                return "a profile is being taken already"
            else:
                trace = ExitStack()
                trace.enter_context(traced(self._engine, Path(path)))
                self._trace = trace
        except Exception as error:  # a profile ends no engine
            _logger.exception("a profile could not be taken")
            return f"the profile could not be taken: {type(error).__name__}"
        return None

    def _prepare(self, command: Add) -> None:
        """Have the grammar of a request compiled; it is added later."""
        if len(self._preparing) >= MAX_PREPARING:
            message = "too many grammars wait to be compiled"
            self._send([Refused(command.request_id, "capacity", message)])
            return
        compiling = self._compiler.submit(self._engine.prepare, command.params)
        self._preparing[command.request_id] = command, compiling
        compiling.add_done_callback(self._wake)

    def _wake(self, _: object = None) -> None:
        """In another thread: a loop that waits for commands is woken. One that has ended is not."""
        with suppress(OSError):
            self._waker.send(b"\0")

    def _add_prepared(self) -> None:
        for request_id, (command, compiling) in list(self._preparing.items()):
            if compiling.done():
                del self._preparing[request_id]
                self._add(command, compiling.exception())

    def _add(self, command: Add, error: BaseException | None = None) -> None:
        """Queue a request, or say why not; `error`: why it cannot be prepared."""
        request_id = command.request_id
        try:
            if error is not None:
                raise error
            token_ids = np.frombuffer(command.token_ids, np.int32)
            prompt = EncodedPrompt(None, token_ids, command.cache_salt)
            self._engine.add_request(request_id, prompt, command.params, command.priority)
            self._send([Accepted(request_id)])
        except RequestError as error:
            self._send([Refused(request_id, "request", str(error), error.field)])
        except CapacityError as error:
            self._send([Refused(request_id, "capacity", str(error))])
        except Exception as error:
            _logger.exception("a request could not be added")
            self._send([Refused(request_id, "engine", step_failure(error))])

    def _report_steps(self, *, is_idle: bool = False) -> None:
        """Tell what steps were made, if it is time: often enough to watch, seldom enough to pay."""
        now_s = time.monotonic()
        if not self._has_news or (now_s < self._told_s + STATISTICS_INTERVAL_S and not is_idle):
            return
        scheduler = self._engine.scheduler
        numbers = len(scheduler.running), len(scheduler.waiting), scheduler.pool.usage
        self._send([Steps(self._steps.copy(), *numbers)])
        self._steps.clear()
        self._has_news = False
        self._told_s = now_s

    def _send(self, reports: Sequence[Report]) -> None:
        if reports:
            send_reports(self._reports, reports)


def send_reports(socket: zmq.Socket[bytes], reports: Sequence[Report]) -> None:
    """Send reports as one frame."""
    socket.send(msgspec.msgpack.encode(reports))
