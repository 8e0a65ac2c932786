"""The engine for asyncio: one thread steps, any number of tasks read their streams.

A failing step ends the requests that ran in it and is reported to their readers; the others go on.
If the next step fails too, or a rank of several is lost, the engine is dead and all readers get the
error.
"""

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

import torch

from outdraft.core.errors import EngineDeadError, GenerationError, RanksError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembler import Assembler
from outdraft.engine.engine import Engine
from outdraft.engine.inputs import EncodedPrompt, Prompt

MAX_FAILED_STEPS = 2


class AsyncEngine:
    """Streams of RequestOutput from an engine that a thread of its own steps.

    Use as an async context manager, or call `start` and `stop`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._assembler = Assembler(engine)  # used by the engine's thread only, as the next
        self._calls: deque[Callable[[], None]] = deque()
        self._lock = threading.Lock()  # a call is either refused or carried out
        self._wake = threading.Event()
        self._stopping = False
        self._dead: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._streams: dict[str, _OutputStream] = {}

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Begin to step."""
        if self._engine.ranks is not None:
            self._engine.ranks.watch(self._wake.set)
        self._thread.start()

    async def stop(self) -> None:
        """Abort all requests and end the thread."""
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    async def generate(
        self, request_id: str, prompt: Prompt, params: SamplingParams, priority: int = 0
    ) -> AsyncIterator[RequestOutput]:
        """Yield snapshots of the request while it grows; the last one is finished.

        Leaving the iteration early aborts the request.

        Raises:
            RequestError, CapacityError: it was not accepted.
            GenerationError: it failed while it ran.
            EngineDeadError: a step failed while it ran.
        """
        # Off the engine's thread: to encode a long text, or to compile a grammar, takes as long as
        # many steps.
        encoded = await asyncio.to_thread(self._engine.inputs.encoded, prompt)
        if params.structured is not None:
            await asyncio.to_thread(self._engine.prepare, params)
        stream = _OutputStream(asyncio.get_running_loop())
        self._post(lambda: self._add(request_id, encoded, params, priority, stream))
        try:
            while True:
                item = await stream.queue.get()
                if isinstance(item, BaseException):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            with suppress(EngineDeadError):
                self._post(lambda: self._drop(request_id, stream))

    def _post(self, call: Callable[[], None]) -> None:
        with self._lock:
            if self._dead is not None:
                why = f": {self._dead}" if isinstance(self._dead, RanksError) else ""
                raise EngineDeadError(f"the engine has stopped{why}") from self._dead
            self._calls.append(call)
        self._wake.set()

    def _add(
        self,
        request_id: str,
        prompt: EncodedPrompt,
        params: SamplingParams,
        priority: int,
        stream: "_OutputStream",
    ) -> None:
        try:
            self._assembler.add_request(request_id, prompt, params, priority)
        except Exception as error:
            stream.put(error)
        else:
            self._streams[request_id] = stream

    def _drop(self, request_id: str, stream: "_OutputStream") -> None:
        if self._streams.get(request_id) is stream:
            del self._streams[request_id]
            self._assembler.abort(request_id)

    def _run(self) -> None:
        """Step until the engine stops; then end all streams, also after an error."""
        cause: Exception = EngineDeadError("the engine was stopped")
        try:
            with torch.inference_mode():
                self._step_until_stopped()
        except Exception as error:
            cause = error
        with self._lock:
            self._dead = cause
        while self._calls:
            with suppress(Exception):
                self._calls.popleft()()
        for stream in self._streams.values():
            stream.put(_died(cause))
        for request_id in list(self._streams):
            with suppress(Exception):
                self._assembler.abort(request_id)
        self._streams.clear()

    def _step_until_stopped(self) -> None:
        failed = 0
        while not self._stopping:
            while self._calls:
                self._calls.popleft()()
            if not self._engine.has_work:
                if self._engine.ranks is not None:
                    self._engine.ranks.check()
                self._wake.wait()
                self._wake.clear()
                continue
            try:
                self._step()
                failed = 0
            except RanksError:
                raise  # there will be no next step
            except Exception as error:
                failed += 1
                if failed >= MAX_FAILED_STEPS:
                    raise
                self._fail_running(error)

    def _step(self) -> None:
        for output in self._assembler.step():
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            if output.error is not None:
                self._assembler.abort(output.request_id)  # its other sequences
                stream.put(GenerationError(output.error))
            else:
                stream.put(output.snapshot())
            if output.finished or output.error is not None:
                del self._streams[output.request_id]

    def _fail_running(self, cause: Exception) -> None:
        for request_id in self._assembler.started_requests():
            self._assembler.abort(request_id)
            stream = self._streams.pop(request_id, None)
            if stream is not None:
                stream.put(_died(cause))


def _died(cause: Exception) -> EngineDeadError:
    """The error that readers get."""
    if isinstance(cause, EngineDeadError):
        return cause
    message = f"a step of the engine failed: {type(cause).__name__}"
    error = EngineDeadError(str(cause) if isinstance(cause, RanksError) else message)
    error.__cause__ = cause
    return error


class _OutputStream:
    """Carries outputs from the engine's thread to a task."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.queue: asyncio.Queue[RequestOutput | BaseException] = asyncio.Queue()

    def put(self, item: RequestOutput | BaseException) -> None:
        with suppress(RuntimeError):  # the reader's loop is closed
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
