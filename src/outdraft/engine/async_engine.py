"""The engine for asyncio: one thread steps, any number of tasks read their streams.

A failing step ends the requests that ran in it and is reported to their readers; the others go on.
If the next step fails too, or a rank of several is lost, the engine is dead and all readers get the
error.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from outdraft.core.errors import EngineDeadError, GenerationError, RanksError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import Assembler, Queued
from outdraft.engine.engine import Engine
from outdraft.engine.inputs import Prompt

MAX_FAILED_STEPS = 2  # one after another, and the engine is dead
_Put = Callable[[RequestOutput | Exception], None]  # hands a request's reader its next item


class AsyncEngine:
    """Streams of RequestOutput from an engine that a thread of its own steps.

    Use as an async context manager, or call `start` and `stop`.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # One thread: it adds and aborts requests between two steps, in the order of the calls.
        self._thread = ThreadPoolExecutor(1, "engine")
        # These are used in that thread only.
        self._assembler = Assembler(engine)
        self._readers: dict[str, _Put] = {}
        self._is_step_queued = False
        self._num_failed = 0
        self._dead: EngineDeadError | None = None

    async def __aenter__(self) -> "AsyncEngine":
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start(self) -> None:
        """Watch the other ranks from now on, if there are some."""
        if self._engine.ranks is not None:
            self._engine.ranks.watch(self._look_after_ranks)

    async def stop(self) -> None:
        """Abort all requests and end the thread."""
        self._call(self._end, EngineDeadError("the engine was stopped"))
        await asyncio.to_thread(self._thread.shutdown)

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
        loop, items = asyncio.get_running_loop(), asyncio.Queue[RequestOutput | Exception]()

        def put(item: RequestOutput | Exception) -> None:
            with suppress(RuntimeError):  # the reader's loop is closed
                loop.call_soon_threadsafe(items.put_nowait, item)

        if not self._call(self._add, (request_id, encoded, params, priority), put):
            raise EngineDeadError("the engine has stopped")
        try:
            while True:
                item = await items.get()
                if isinstance(item, Exception):
                    raise item
                yield item
                if item.finished:
                    return
        finally:
            self._call(self._drop, request_id, put)

    def _call(self, function: Callable[..., None], *arguments: object) -> bool:
        """Have a function called in the engine's thread; False: it has been stopped."""
        with suppress(RuntimeError):
            self._thread.submit(function, *arguments)
            return True
        return False

    def _look_after_ranks(self) -> None:
        self._call(self._step)

    def _add(self, request: Queued, put: _Put) -> None:
        try:
            if self._dead is not None:
                why = f": {self._dead}" if isinstance(self._dead.__cause__, RanksError) else ""
                raise EngineDeadError(f"the engine has stopped{why}") from self._dead
            self._assembler.add_request(*request)
        except Exception as error:
            put(error)
        else:
            self._readers[request[0]] = put
            self._queue_step()

    def _drop(self, request_id: str, put: _Put) -> None:
        if self._readers.get(request_id) is put:
            self._fail([request_id])

    def _queue_step(self) -> None:
        if self._engine.has_work and not self._is_step_queued and self._dead is None:
            self._is_step_queued = True
            self._call(self._step)

    def _step(self) -> None:
        """Step if there is something to do, and queue the next one."""
        self._is_step_queued = False
        if self._dead is None:
            try:
                self._advance()
            except Exception as error:
                self._end(_died(error))
        self._queue_step()

    def _advance(self) -> None:
        try:
            if not self._engine.has_work and self._engine.ranks is not None:
                self._engine.ranks.check()
            for output in self._assembler.step():
                self._tell(output)
            self._num_failed = 0
        except RanksError:
            raise  # there will be no next step
        except Exception as error:
            self._num_failed += 1
            if self._num_failed >= MAX_FAILED_STEPS:
                raise
            self._fail(self._assembler.started_requests(), _died(error))

    def _tell(self, output: RequestOutput) -> None:
        if output.error is not None:  # its other sequences are aborted
            self._fail([output.request_id], GenerationError(output.error))
        elif (put := self._readers.get(output.request_id)) is not None:
            put(output.snapshot())
            if output.finished:
                del self._readers[output.request_id]

    def _fail(self, request_ids: Iterable[str], error: Exception | None = None) -> None:
        """Abort requests; their readers get the error, if there is one."""
        for request_id in request_ids:
            put = self._readers.pop(request_id, None)
            if put is not None and error is not None:
                put(error)
            self._assembler.abort(request_id)

    def _end(self, error: EngineDeadError) -> None:
        """End everything, and refuse what comes."""
        if self._dead is None:
            self._dead = error
            for put in self._readers.values():
                put(error)
            for request_id in self._readers:
                with suppress(Exception):  # the engine may be broken
                    self._assembler.abort(request_id)
            self._readers.clear()


def _died(cause: Exception) -> EngineDeadError:
    """The error that readers get."""
    message = str(cause) if isinstance(cause, RanksError) else step_failure(cause)
    error = EngineDeadError(message)
    error.__cause__ = cause
    return error


def step_failure(error: Exception) -> str:
    """The message for readers, without any text of a request."""
    return f"a step of the engine failed: {type(error).__name__}"
