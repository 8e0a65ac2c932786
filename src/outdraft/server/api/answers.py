"""One answer of the chat or the completions route, whole or as a stream of chunks."""

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

from starlette.responses import Response

from outdraft.core.errors import RequestError
from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.server.api.fields import ChoiceFields, StreamOptions
from outdraft.server.api.generation import Generation, outputs, updates
from outdraft.server.api.params import wants_metrics
from outdraft.server.api.replies import COMMENT, DONE, EventStream, JsonLater, event
from outdraft.server.api.reports import metrics, usage
from outdraft.server.api.settings import ApiContext

Json = dict[str, Any]

_NO_OPTIONS = StreamOptions.model_validate({})


class Shape(Protocol):
    """How a route writes its choices. `number` is a prompt's."""

    kind: ClassVar[str]  # value of "object" in a whole answer
    chunk_kind: ClassVar[str]  # the same in a stream
    opens_at_once: ClassVar[bool]  # whether a stream has `opening` before the prompt is computed

    def head(self, output: RequestOutput) -> Json:
        """What a whole answer, and the first chunk, say beside their choices."""
        ...

    def choices(self, number: int, output: RequestOutput) -> list[Json]:
        """The finished choices of a prompt."""
        ...

    def opening(self, number: int, output: RequestOutput) -> list[Json]:
        """Choices of the chunks that come before any delta of the prompt."""
        ...

    def pieces(self, number: int, delta: CompletionOutput) -> list[Json]:
        """Choices of the chunks that tell a delta."""
        ...


@dataclass(slots=True)
class Answer:
    """An answer under way.

    Attributes:
        counts_output: False if the tokens were generated in vain: see echo without max_tokens.
    """

    context: ApiContext
    body: ChoiceFields
    generation: Generation
    model: str
    shape: Shape
    counts_output: bool = True
    created_s: int = field(default_factory=lambda: int(time.time()), init=False)

    def reply(self) -> Response:
        """Whatever the body asks for."""
        if self.body.stream:
            settings = self.context.settings
            return EventStream(self._events(), settings.retry_after_s, silence_s=settings.silence_s)
        return JsonLater(self._whole())

    async def _whole(self) -> Json:
        done = await outputs(self.context, self.generation)
        choices = [
            choice
            for number, output in enumerate(done)
            for choice in self.shape.choices(number, output)
        ]
        result = self._envelope(self.shape.kind, choices) | self.shape.head(done[0])
        return result | {"usage": self._usage(done)} | self._metrics(done)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options or _NO_OPTIONS
        done: dict[int, RequestOutput] = {}
        async with aclosing(updates(self.context, self.generation)) as stream:
            async for number, update in stream:
                chunks: list[Json] = []
                if not update.deltas and not self.shape.opens_at_once:
                    yield COMMENT  # the request was accepted
                    continue
                if number not in done:
                    head = self.shape.head(update.output)
                    opening = self.shape.opening(number, update.output)
                    chunks += [self._chunk([choice]) | head for choice in opening]
                done[number] = update.output
                for delta in update.deltas:
                    chunks += [self._chunk([one]) for one in self.shape.pieces(number, delta)]
                if options.continuous_usage_stats:
                    so_far = {"usage": self._usage(done.values())}
                    chunks = [chunk | so_far for chunk in chunks]
                for chunk in chunks:
                    yield event(chunk)
        last = self._metrics(list(done.values()))
        if options.include_usage:
            last["usage"] = self._usage(done.values())
        if last:
            yield event(self._chunk([]) | last)
        yield DONE

    def _chunk(self, choices: list[Json]) -> Json:
        result = self._envelope(self.shape.chunk_kind, choices)
        options = self.body.stream_options
        return result | {"usage": None} if options and options.include_usage else result

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.generation.request_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }

    def _usage(self, done: Iterable[RequestOutput]) -> Json:
        result = usage(done)
        if not self.counts_output:
            result |= {"completion_tokens": 0, "total_tokens": result["prompt_tokens"]}
        return result

    def _metrics(self, done: list[RequestOutput]) -> Json:
        """As in vLLM, for requests with one prompt only."""
        if not wants_metrics(self.body) or len(done) != 1:
            return {}
        return {"metrics": metrics(done[0])}


def check_stream_options(body: ChoiceFields) -> None:
    """Refuse what makes sense only with a stream, or only without.

    Raises:
        RequestError: naming it.
    """
    options = body.stream_options or _NO_OPTIONS
    if (options.include_usage or options.continuous_usage_stats) and not body.stream:
        raise RequestError("stream_options needs stream=true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs is not available in a stream", "prompt_logprobs")
