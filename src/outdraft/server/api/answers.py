"""One answer of the chat or the completions route, whole or as a stream of chunks."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from starlette.responses import Response
from tokenizers import Tokenizer

from outdraft.core.errors import RequestError
from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.server.api.fields import ChoiceFields, StreamOptions
from outdraft.server.api.params import wants_metrics
from outdraft.server.api.prompt_batch import PromptBatch
from outdraft.server.api.replies import COMMENT, DONE, EventStream, JsonLater, event
from outdraft.server.api.reports import metrics, usage

Json = dict[str, Any]
Body = TypeVar("Body", bound=ChoiceFields)

_NO_OPTIONS = StreamOptions.model_validate({})


@dataclass(slots=True)
class Answer(ABC, Generic[Body]):
    """An answer under way; a route says how its choices are written.

    Attributes:
        kind: value of "object" in a whole answer.
        chunk_kind: the same in a stream.
        opens_at_once: whether a stream has `opening` before the prompt is computed.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    opens_at_once: ClassVar[bool]

    batch: PromptBatch
    body: Body
    model: str
    created_s: int = field(default_factory=lambda: int(time.time()), init=False)

    @abstractmethod
    def head(self, output: RequestOutput) -> Json:
        """Fields of a whole answer, and of the first chunk, beside their choices."""

    @abstractmethod
    def choices(self, number: int, output: RequestOutput) -> list[Json]:
        """The finished choices of a prompt, by its number."""

    @abstractmethod
    def opening(self, number: int, output: RequestOutput) -> list[Json]:
        """Choices of the chunks that come before any delta of the prompt."""

    @abstractmethod
    def pieces(self, number: int, delta: CompletionOutput) -> list[Json]:
        """Choices of the chunks that a delta becomes."""

    @property
    def counts_output(self) -> bool:
        """False if the generated tokens are not part of the answer."""
        return True

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.batch.context.inputs.tokenizer

    def reply(self) -> Response:
        """A stream or a whole answer, as the body asks."""
        if self.body.stream:
            settings = self.batch.context.settings
            return EventStream(self.events(), settings.retry_after_s, silence_s=settings.silence_s)
        return JsonLater(self.whole())

    async def whole(self) -> Json:
        done = await self.batch.outputs()
        choices = [
            choice for number, output in enumerate(done) for choice in self.choices(number, output)
        ]
        result = self._envelope(self.kind, choices) | self.head(done[0])
        return result | {"usage": self._usage(done)} | self._metrics(done)

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options or _NO_OPTIONS
        done: dict[int, RequestOutput] = {}
        async with aclosing(self.batch.updates()) as stream:
            async for number, update in stream:
                chunks: list[Json] = []
                if not update.deltas and not self.opens_at_once:
                    yield COMMENT  # the request was accepted
                    continue
                if number not in done:
                    head = self.head(update.output)
                    opening = self.opening(number, update.output)
                    chunks += [self._chunk([choice]) | head for choice in opening]
                done[number] = update.output
                for delta in update.deltas:
                    chunks += [self._chunk([one]) for one in self.pieces(number, delta)]
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
        result = self._envelope(self.chunk_kind, choices)
        options = self.body.stream_options
        return result | {"usage": None} if options and options.include_usage else result

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.batch.request_id,
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
        """Metrics if the body asks and, as in vLLM, has one prompt."""
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
