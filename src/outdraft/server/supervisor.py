"""One EngineClient for the whole life of a server, whatever becomes of its engines."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

from outdraft.core.errors import EngineDeadError
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import InputProcessor
from outdraft.engine.prompts import EncodedPrompt
from outdraft.engine.tokenizer import load_tokenizer
from outdraft.server.client import Update
from outdraft.server.engine_process import EngineProcess, OnLoading
from outdraft.server.messages import EngineInfo, Steps
from outdraft.server.metrics import Metrics
from outdraft.server.process_client import ProcessClient


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
