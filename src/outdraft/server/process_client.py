"""The engine of another process as an EngineClient, and one such client for a server's whole life.

Texts are made here: the engine knows ids only. Each request has an assembly that grows with every
step, whether its reader comes for it or not, so a slow reader costs no more than its output.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from pathlib import Path

from outdraft.core.deltas import RequestDelta
from outdraft.core.errors import (
    CapacityError,
    EngineDeadError,
    GenerationError,
    OutdraftError,
    RequestError,
)
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import RequestAssembly
from outdraft.engine.inputs import EncodedPrompt, InputProcessor
from outdraft.engine.tokenizer import load_tokenizer
from outdraft.server.client import Unread, Update
from outdraft.server.engine_process import EngineProcess, OnLoading
from outdraft.server.messages import (
    Abort,
    Add,
    EndSequence,
    EngineInfo,
    Failed,
    Profile,
    Profiled,
    Progress,
    Refused,
    Report,
    Steps,
)
from outdraft.server.metrics import Metrics


class ProcessClient:
    """An EngineClient; `run` has to run beside it."""

    def __init__(self, process: EngineProcess, info: EngineInfo, inputs: InputProcessor) -> None:
        self.info = info
        self._process = process
        self._inputs = inputs
        self._streams: dict[str, _Stream] = {}
        self._watchers: list[Callable[[Steps], None]] = []
        self._cause: str | None = None  # why the engine is dead
        self._ended_by: str | None = None
        self._num_sent = 0
        self._profiles: deque[asyncio.Future[str | None]] = deque()  # commands without an answer

    @property
    def is_alive(self) -> bool:
        return self._cause is None

    @property
    def ended_by(self) -> str | None:
        return self._ended_by

    @property
    def num_unfinished(self) -> int:
        return len(self._streams)

    def watch(self, on_steps: Callable[[Steps], None]) -> None:
        """As Supervisor.watch."""
        self._watchers.append(on_steps)

    async def run(self) -> None:
        """Read reports until the engine dies; then everybody who waits is told."""
        reading = asyncio.create_task(self._read())
        death = asyncio.create_task(self._process.death())
        cause = "the engine process has died"
        try:
            await asyncio.wait({reading, death}, return_when=asyncio.FIRST_COMPLETED)
            if death.done() and self._cause is None:
                self._ended_by = death.result()
                cause = f"{cause}: {self._ended_by}"
            elif self._cause is None:
                reading.result()  # a report that cannot be read is no better than none
        finally:
            death.cancel()
            reading.cancel()
            self.close(cause)

    def close(self, cause: str) -> None:
        """End the engine and every stream that is open."""
        if self._cause is not None:
            return
        self._cause = cause
        self._process.end()
        for stream in self._streams.values():
            stream.fail(EngineDeadError(self._cause, self._ended_by))
        while self._profiles:
            if not (answer := self._profiles.popleft()).done():
                answer.set_exception(EngineDeadError(self._cause, self._ended_by))

    async def profile(self, path: str | None) -> str | None:
        if self._cause is not None:
            raise EngineDeadError(self._cause, self._ended_by)
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._profiles.append(answer)
        self._process.send(Profile(path))
        return await answer

    async def generate(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0
    ) -> AsyncGenerator[Update]:
        self._inputs.check_params(params)
        prediction = params.prediction
        if isinstance(prediction, str):
            prediction = await asyncio.to_thread(self._inputs.prediction_ids, params)
        if self._cause is not None:
            raise EngineDeadError(self._cause, self._ended_by)
        # Ids on the wire are used once: reports on an aborted request reach no later one.
        self._num_sent += 1
        wire_id = f"{self._num_sent}:{request_id}"
        assembly = RequestAssembly(request_id, prompt, params, self._inputs)
        stream = self._streams[wire_id] = _Stream(assembly)
        sent = replace(params, prediction=prediction)
        ids = assembly.output.prompt_token_ids
        self._process.send(Add(wire_id, ids, sent, priority, prompt.cache_salt))
        try:
            is_last = False
            while not is_last:
                update = await stream.next()
                is_last = update.output.finished  # it goes on growing while the reader has it
                yield update
        finally:
            del self._streams[wire_id]
            if not assembly.output.finished and self._cause is None:
                self._process.send(Abort(wire_id))

    async def _read(self) -> None:
        while self.is_alive:
            for report in await self._process.receive():
                self._handle(report)
            await asyncio.sleep(0)  # a report that is there already is received without waiting

    def _handle(self, report: Report) -> None:
        if isinstance(report, Progress):
            for delta in report.deltas:
                self._advance(delta)
        elif isinstance(report, Refused):
            if (stream := self._streams.get(report.request_id)) is not None:
                stream.fail(_refusal(report))
        elif isinstance(report, Profiled):
            if not (answer := self._profiles.popleft()).done():  # its reader may have left
                answer.set_result(report.error)
        elif isinstance(report, Steps):
            for on_steps in self._watchers:
                on_steps(report)
        elif isinstance(report, Failed):
            self.close(report.message)

    def _advance(self, delta: RequestDelta) -> None:
        wire_id = delta.request_id
        stream = self._streams.get(wire_id)
        if stream is None or stream.assembly.output.finished:
            return  # its reader left, or it ended at a stop string
        stopped = stream.assembly.add(delta)
        stream.wake()
        for completion in stopped:
            num_tokens = len(completion.token_ids)
            self._process.send(EndSequence(wire_id, completion.index, num_tokens))


class _Stream:
    """Between the reports on one request and its reader."""

    def __init__(self, assembly: RequestAssembly) -> None:
        self.assembly = assembly
        self._unread = Unread(assembly.output)
        self._news = asyncio.Event()
        self._error: OutdraftError | None = None

    async def next(self) -> Update:
        """Everything that came since it was asked last."""
        await self._news.wait()
        if self._error is not None:
            raise self._error
        if self.assembly.output.error is not None:
            raise GenerationError(self.assembly.output.error)
        self._news.clear()
        return self._unread.take()

    def wake(self) -> None:
        self._news.set()

    def fail(self, error: OutdraftError) -> None:
        if not self.assembly.output.finished:
            self._error = error
            self._news.set()


def _refusal(report: Refused) -> OutdraftError:
    if report.kind == "request":
        return RequestError(report.message, report.field)
    if report.kind == "capacity":
        return CapacityError(report.message)
    return EngineDeadError(report.message)


class Supervisor:
    """Starts an engine process, and another one when it dies if `restarts`.

    While there is none, `is_alive` is false and requests are refused.
    """

    def __init__(
        self, launch: Callable[[], EngineProcess], on_loading: OnLoading, *, restarts: bool
    ) -> None:
        self._launch = launch
        self._on_loading = on_loading
        self._restarts = restarts
        self._client: ProcessClient | None = None
        self._inputs: InputProcessor | None = None
        self._watchers: list[Callable[[Steps], None]] = []
        self._metrics: Metrics | None = None
        self._is_closed = False

    @property
    def info(self) -> EngineInfo:
        return self._started.info

    @property
    def inputs(self) -> InputProcessor:
        """Checks and encodes prompts for the engine."""
        assert self._inputs is not None, "start() comes first"
        return self._inputs

    @property
    def is_alive(self) -> bool:
        return self._client is not None and self._client.is_alive

    @property
    def ended_by(self) -> str | None:
        return self._client.ended_by if self._client is not None else None

    @property
    def num_unfinished(self) -> int:
        return self._started.num_unfinished

    def generate(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0
    ) -> AsyncGenerator[Update]:
        stream = self._started.generate(request_id, prompt, params, priority)
        return stream if self._metrics is None else self._metrics.observed(stream, params.n)

    async def profile(self, path: str | None) -> str | None:
        return await self._started.profile(path)

    def observe(self, metrics: Metrics) -> None:
        """Have all steps and requests counted from now on."""
        self._metrics = metrics
        self.watch(metrics.observe_steps)

    def watch(self, on_steps: Callable[[Steps], None]) -> None:
        """Have a function called with the engine's statistics, several times a second at most."""
        self._watchers.append(on_steps)
        self._started.watch(on_steps)

    async def start(self) -> None:
        """Wait for an engine that is ready.

        Raises:
            ConfigError, EngineDeadError: there will be none.
        """
        process = self._launch()
        try:
            info = await process.started(self._on_loading)
            if self._inputs is None:
                self._inputs = await asyncio.to_thread(_input_processor, info)
        except BaseException:
            process.end()
            raise
        self._client = ProcessClient(process, info, self._inputs)
        for on_steps in self._watchers:
            self._client.watch(on_steps)

    async def run(self) -> None:
        """Until the engine has died for good.

        Raises:
            ConfigError, EngineDeadError: another one could not be started.
        """
        await self._started.run()
        while self._restarts and not self._is_closed:
            await self.start()
            await self._started.run()

    def close(self, cause: str) -> None:
        """End the engine; open streams get an EngineDeadError with the cause."""
        self._is_closed = True
        if self._client is not None:
            self._client.close(cause)

    @property
    def _started(self) -> ProcessClient:
        if self._client is None:
            raise EngineDeadError("the engine has not been started")
        return self._client


def _input_processor(info: EngineInfo) -> InputProcessor:
    return InputProcessor(
        load_tokenizer(Path(info.tokenizer_path)),
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        seed=0,  # of no use here: the engine chooses the noise
    )
