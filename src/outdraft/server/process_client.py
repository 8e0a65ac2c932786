"""The engine of another process, for a server's whole life.

Texts are made here: the engine knows ids only. Each request has an assembly that grows with every
step, whether its reader comes for it or not, so a slow reader costs no more than its output.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import replace
from pathlib import Path

from outdraft.core.errors import (
    CapacityError,
    EngineDeadError,
    GenerationError,
    OutdraftError,
    RequestError,
)
from outdraft.core.outputs import CompletionOutput, RequestDelta
from outdraft.core.request import FinishReason
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import RequestAssembly
from outdraft.engine.inputs import EncodedPrompt, InputProcessor
from outdraft.server import messages
from outdraft.server.client import EngineLink, OnLoading, Update
from outdraft.server.messages import EngineInfo, Steps
from outdraft.server.metrics import Metrics
from outdraft.server.trace_file import TraceFile
from outdraft.text.tokenizer import load_tokenizer


def input_processor_of(info: EngineInfo) -> InputProcessor:
    """Checks and encodes prompts for an engine, with the tokenizer that it names."""
    return InputProcessor(
        load_tokenizer(Path(info.tokenizer_path)),
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        eos_token_ids=info.eos_token_ids,
        seed=0,  # of no use here: the engine chooses the noise
    )


class Supervisor:
    """One `EngineClient` for the whole life of a server.

    It starts an engine, and another one when that dies if `restarts`. While there is none,
    `is_alive` is false and requests are refused.

    `input_processor`: makes what checks and encodes prompts.

    Attributes:
        watchers: are called with the engine's statistics, several times a second at most.
    """

    info: EngineInfo  # as `start` has found it
    inputs: InputProcessor

    def __init__(
        self,
        launch: Callable[[], EngineLink],
        on_loading: OnLoading,
        *,
        restarts: bool,
        input_processor: Callable[[EngineInfo], InputProcessor] = input_processor_of,
    ) -> None:
        self._launch = launch
        self._on_loading = on_loading
        self._restarts = restarts
        self._input_processor = input_processor
        self._is_closed = False
        self._cause: str | None = "the engine has not been started"  # why there is none
        self.ended_by: str | None = None
        self._requests: dict[str, _OpenRequest] = {}
        self._num_sent = 0
        self._profiles: deque[asyncio.Future[str | None]] = deque()  # commands without an answer
        self.watchers: list[Callable[[Steps], None]] = []
        self._metrics: Metrics | None = None
        self._trace: TraceFile | None = None

    @property
    def is_alive(self) -> bool:
        return self._cause is None

    @property
    def num_unfinished(self) -> int:
        return len(self._requests)

    def observe(self, metrics: Metrics) -> None:
        """Have all steps and requests counted from now on."""
        self._metrics = metrics
        self.watchers.append(metrics.observe_steps)

    def record(self, trace: TraceFile) -> None:
        """Have every request that ends written down from now on, those that are aborted too."""
        self._trace = trace

    async def start(self) -> None:
        """Wait for an engine that is ready.

        Raises:
            ConfigError, EngineDeadError: there will be none.
        """
        self._link = self._launch()
        try:
            self.info = await self._link.started(self._on_loading)
            self.inputs = await asyncio.to_thread(self._input_processor, self.info)
        except BaseException:
            self._link.end()
            raise
        self._cause = self.ended_by = None

    async def run(self) -> None:
        """Run until the engine has died for good; readers of one that dies get an error.

        Raises:
            ConfigError, EngineDeadError: another one could not be started.
        """
        await self._run()
        while self._restarts and not self._is_closed:
            await self.start()
            await self._run()

    def close(self, cause: str) -> None:
        self._is_closed = True
        self._end(cause)

    async def profile(self, path: str | None) -> str | None:
        if not self.is_alive:
            raise self._dead()
        answer: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self._link.send(messages.Profile(path))
        self._profiles.append(answer)
        return await answer

    def _dead(self) -> EngineDeadError:
        return EngineDeadError(self._cause or "the engine process has died", self.ended_by)

    async def _run(self) -> None:
        """Read reports until the engine dies."""
        cause = "the engine process has died"
        try:
            # A report that cannot be read is no better than none.
            await self._link.while_alive(self._read(self._link), cause)
        except EngineDeadError as error:
            if self.is_alive:
                cause, self.ended_by = str(error), error.ended_by
        except asyncio.CancelledError:
            if self.is_alive:  # else the sockets were closed, which cancels who reads from them
                raise
        finally:
            self._end(cause)

    def _end(self, cause: str) -> None:
        """End the engine and every stream that is open."""
        if not self.is_alive:
            return
        self._cause = cause
        self._link.end()
        for request in self._requests.values():
            request.fail(self._dead())
        while self._profiles:
            if not (answer := self._profiles.popleft()).done():
                answer.set_exception(self._dead())

    async def generate(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0
    ) -> AsyncGenerator[Update]:
        inputs = self.inputs
        inputs.check_params(params)
        sent = params
        if isinstance(params.prediction, str):
            ids = await asyncio.to_thread(inputs.prediction_ids, params)
            sent = replace(params, prediction=ids)
        if not self.is_alive:
            if self._metrics is not None:
                self._metrics.observe_unfinished(params.n, FinishReason.ERROR)
            raise self._dead()
        # Ids on the wire are used once: reports on an aborted request reach no later one.
        self._num_sent += 1
        wire_id = f"{self._num_sent}:{request_id}"
        trace = self._trace
        assembly = RequestAssembly(
            request_id, prompt, params, inputs, keeps_steps=trace is not None
        )
        token_ids = prompt.token_ids.tobytes()
        self._link.send(messages.Add(wire_id, token_ids, sent, priority, prompt.cache_salt))
        request = self._requests[wire_id] = _OpenRequest(assembly)
        try:
            is_last = False
            while not is_last:
                update = await request.next()
                is_last = update.output.finished  # it goes on growing while the reader has it
                yield update
        finally:
            del self._requests[wire_id]
            if not assembly.output.finished and self.is_alive:
                self._link.send(messages.Abort(wire_id))
            if not isinstance(request.error, RequestError | CapacityError):  # it was accepted
                reason = FinishReason.ABORT if request.error is None else FinishReason.ERROR
                if self._metrics is not None:
                    unended = [one for one in assembly.output.outputs if one.finish_reason is None]
                    self._metrics.observe_unfinished(len(unended), reason)
                if trace is not None:
                    trace.record(assembly, sent, inputs.max_model_len, reason)

    async def _read(self, process: EngineLink) -> None:
        while self.is_alive:
            for report in await process.receive():
                self._handle(report)
            await asyncio.sleep(0)  # a report that is there already is received without waiting

    def _handle(self, report: messages.Report) -> None:
        match report:
            case messages.Progress(deltas):
                for delta in deltas:
                    self._advance(delta)
            case messages.Accepted(request_id) if request_id in self._requests:
                self._requests[request_id].add([])
            case messages.Refused(request_id) if request_id in self._requests:
                self._requests[request_id].fail(_refusal(report))
            case messages.Profiled(error):
                if not (answer := self._profiles.popleft()).done():  # its reader may have left
                    answer.set_result(error)
            case Steps():
                for on_steps in self.watchers:
                    on_steps(report)
            case messages.EngineFailed(kind, message):
                self.ended_by = message if kind == "ranks" else self.ended_by
                self._end(message)
            case _:  # on a request whose reader has left, or of the start
                pass

    def _advance(self, delta: RequestDelta) -> None:
        wire_id = delta.request_id
        request = self._requests.get(wire_id)
        if request is None or request.assembly.output.finished:
            return  # its reader left, or it ended at a stop string
        output = request.assembly.output
        before = output.metrics.last_token_s, output.metrics.num_preemptions
        gained, stopped = request.assembly.add(delta)
        if self._metrics is not None:
            self._metrics.observe_request(output, gained, *before)
        request.add(gained)
        for completion in stopped:
            num_tokens = len(completion.token_ids)
            self._link.send(messages.EndSequence(wire_id, completion.index, num_tokens))


class _OpenRequest:
    """Between the reports on one request and its reader.

    Attributes:
        error: the reason why it was refused, or failed.
    """

    def __init__(self, assembly: RequestAssembly) -> None:
        self.assembly = assembly
        self._gained: dict[int, CompletionOutput] = {}  # by sequence; not read yet
        self._news = asyncio.Event()
        self.error: OutdraftError | None = None

    def add(self, gained: Iterable[CompletionOutput]) -> None:
        """Wake the reader; what it has not read yet becomes one delta for each sequence."""
        for delta in gained:
            if (unread := self._gained.setdefault(delta.index, delta)) is not delta:
                unread.extend(delta)
        self._news.set()

    async def next(self) -> Update:
        """Everything that came since the last call."""
        await self._news.wait()
        output = self.assembly.output
        if self.error is None and output.error is not None:
            self.error = GenerationError(output.error)
        if self.error is not None:
            raise self.error
        self._news.clear()
        deltas = [self._gained[index] for index in sorted(self._gained)]
        self._gained.clear()
        return Update(output, deltas)

    def fail(self, error: OutdraftError) -> None:
        if not self.assembly.output.finished:
            self.error = error
            self._news.set()


def _refusal(report: messages.Refused) -> OutdraftError:
    if report.kind == "request":
        return RequestError(report.message, report.field)
    if report.kind == "capacity":
        return CapacityError(report.message)
    return EngineDeadError(report.message)
