"""An engine client that keeps the metrics: whoever streams through it need not know of them."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from outdraft.core.errors import EngineDeadError, GenerationError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt
from outdraft.server.client import EngineClient, Update
from outdraft.server.messages import EngineInfo, Steps
from outdraft.server.metrics import Metrics


class ObservedClient:
    """An EngineClient: another one, whose steps and requests are counted."""

    def __init__(self, client: EngineClient, metrics: Metrics) -> None:
        self._client = client
        self._metrics = metrics
        client.watch(metrics.observe_steps)

    @property
    def info(self) -> EngineInfo:
        return self._client.info

    @property
    def is_alive(self) -> bool:
        return self._client.is_alive

    @property
    def ended_by(self) -> str | None:
        return self._client.ended_by

    @property
    def num_unfinished(self) -> int:
        return self._client.num_unfinished

    async def profile(self, path: str | None) -> str | None:
        return await self._client.profile(path)

    def watch(self, on_steps: Callable[[Steps], None]) -> None:
        self._client.watch(on_steps)

    async def generate(
        self, request_id: str, prompt: EncodedPrompt, params: SamplingParams, priority: int = 0
    ) -> AsyncGenerator[Update, None]:
        """See EngineClient. An update is counted before it is passed on."""
        stream = self._client.generate(request_id, prompt, params, priority)
        request = _Observed(self._metrics, params.n)
        try:
            async for update in stream:
                request.observe(update)
                yield update
        except (EngineDeadError, GenerationError):
            request.end_early("error")
            raise
        except (GeneratorExit, asyncio.CancelledError):
            request.end_early("abort")
            raise
        finally:
            await _close(stream)


class _Observed:
    """What one request has told so far."""

    def __init__(self, metrics: Metrics, num_sequences: int) -> None:
        self._metrics = metrics
        self._num_running = num_sequences
        self._last_token_s: float | None = None
        self._num_preemptions = 0

    def observe(self, update: Update) -> None:
        output = update.output
        if any(delta.token_ids for delta in update.deltas):
            self._observe_tokens(output)
        if output.metrics.num_preemptions > self._num_preemptions:
            self._metrics.preempted(output.metrics.num_preemptions - self._num_preemptions)
            self._num_preemptions = output.metrics.num_preemptions
        for delta in update.deltas:
            if delta.finish_reason is not None:
                self._num_running -= 1
                self._metrics.sequences_ended(delta.finish_reason, 1)
        if output.finished:
            self._metrics.finished(output)

    def end_early(self, reason: str) -> None:
        """Nobody reads on; nothing happens if all sequences had ended."""
        self._metrics.sequences_ended(reason, self._num_running)

    def _observe_tokens(self, output: RequestOutput) -> None:
        arrived_s = output.metrics.last_token_s
        assert arrived_s is not None
        if self._last_token_s is None:
            self._metrics.first_token(output)
        else:
            self._metrics.more_tokens(arrived_s - self._last_token_s)
        self._last_token_s = arrived_s


async def _close(stream: AsyncIterator[Update]) -> None:
    """Abort the request, if it still runs: now, and not when the stream is collected."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
