"""One answer under way: each prompt is a request to the engine, and all of them are one stream."""

import asyncio
import time
from abc import ABC, abstractmethod
from asyncio import ensure_future
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from starlette.responses import Response
from tokenizers import Tokenizer

from outdraft.core.errors import ContextLengthError, ReplicaLostError, RequestError
from outdraft.core.outputs import CompletionOutput, RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt
from outdraft.server.api.errors import ApiError, error_json
from outdraft.server.api.fields import ChoiceFields, SamplingFields, StreamOptions
from outdraft.server.api.params import form_field, wants_metrics
from outdraft.server.api.replies import COMMENT, DONE, EventStream, JsonLater, event
from outdraft.server.api.reports import TokenNames, metrics, trace, usage
from outdraft.server.api.settings import ApiContext
from outdraft.server.client import Update

Json = dict[str, Any]
Body = TypeVar("Body", bound=SamplingFields)
ChoiceBody = TypeVar("ChoiceBody", bound=ChoiceFields)

_NO_OPTIONS = StreamOptions.model_validate({})


@dataclass(slots=True)
class Answer(ABC, Generic[Body]):
    """An answer to prompts with the same sampling parameters; a route says how it is written.

    Attributes:
        prefix: of its id.
    """

    prefix: ClassVar[str]

    context: ApiContext
    body: Body
    model: str
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    request_id: str = field(init=False)
    created_s: int = field(default_factory=lambda: int(time.time()), init=False)

    def __post_init__(self) -> None:
        """
        Raises:
            ContextLengthError: the context has no room for all tokens that are asked for.
            RequestError: there would be too many choices.
        """
        names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
        asked = [(name, most) for name in names if (most := getattr(self.body, name, None))]
        num_prompt = max(len(prompt.token_ids) for prompt in self.prompts)
        limit = self.context.inputs.max_model_len
        if asked and num_prompt + asked[0][1] > limit:
            name, max_tokens = asked[0]
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, the prompt has "
                f"{num_prompt} tokens, and {name} asks for {max_tokens} more: "
                f"{limit - num_prompt} are left",
                name,
            )
        num_choices, most = len(self.prompts) * self.params.n, self.context.settings.max_choices
        if num_choices > most:
            raise RequestError(
                f"{len(self.prompts)} prompts with n={self.params.n} make {num_choices} choices, "
                f"at most {most} are allowed",
                "n",
            )
        self.request_id = f"{self.prefix}{self.body.request_id or uuid4().hex}"

    @abstractmethod
    async def whole(self) -> Json:
        """The answer, when it has ended."""

    @abstractmethod
    def events(self) -> AsyncGenerator[bytes, None]:
        """The answer piece by piece, as server-sent events."""

    def error_event(self, error: ApiError) -> bytes:
        """The end of a stream that failed."""
        return b"data: " + error_json(error) + b"\n\n" + DONE

    def reply(self) -> Response:
        """A stream or a whole answer, as the body asks."""
        if not self.body.stream:
            return JsonLater(self.whole())
        return EventStream(self.events(), self.error_event, self.context.settings)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.context.inputs.tokenizer

    async def updates(self) -> AsyncGenerator[tuple[int, Update]]:
        """Every update with the number of its prompt. Closing it early aborts all that runs.

        Raises:
            RequestError, CapacityError, GenerationError, EngineDeadError: as EngineClient.generate.
        """
        client, priority = self.context.client, self.body.priority or 0
        async with AsyncExitStack() as stack:
            streams: list[AsyncGenerator[Update]] = []
            for number, prompt in enumerate(self.prompts):
                request_id = f"{self.request_id}-{number}"
                stream = client.generate(request_id, prompt, self.params, priority)
                streams.append(await stack.enter_async_context(aclosing(stream)))
            try:
                if len(streams) == 1:
                    async for update in streams[0]:
                        yield 0, update
                    return
                async with aclosing(_merged(streams)) as merged:
                    async for pair in merged:
                        yield pair
            except RequestError as error:
                if error.field != "structured":
                    raise
                raise RequestError(str(error), form_field(self.body)) from error

    async def outputs(self) -> list[RequestOutput]:
        """The finished outputs, one a prompt. Nothing was sent before them, so a replica that is
        lost is no error: another one begins anew.

        Raises:
            RequestError, CapacityError, GenerationError, EngineDeadError: as EngineClient.generate.
        """
        try:
            return await self._outputs()
        except ReplicaLostError:
            return await self._outputs()

    async def _outputs(self) -> list[RequestOutput]:
        last: dict[int, RequestOutput] = {}
        async with aclosing(self.updates()) as stream:
            async for number, update in stream:
                last[number] = update.output
        return [last[number] for number in range(len(self.prompts))]


@dataclass(slots=True)
class ChoicesAnswer(Answer[ChoiceBody]):
    """An answer of the chat or the completions route; it says how its choices are written.

    Attributes:
        kind: value of "object" in a whole answer.
        chunk_kind: the same in a stream.
        opens_at_once: whether a stream has `opening` before the prompt is computed.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    opens_at_once: ClassVar[bool]

    def head(self, output: RequestOutput) -> Json:
        """Fields of a whole answer, and of the first chunk, beside their choices."""
        return {}

    @abstractmethod
    def choice(self, number: int, one: CompletionOutput, output: RequestOutput) -> Json:
        """A finished choice of a prompt, by its number."""

    @abstractmethod
    def opening(self, number: int, one: CompletionOutput, output: RequestOutput) -> Json | None:
        """The choice of a chunk that comes before any delta of the prompt; None: there is none."""

    @abstractmethod
    def pieces(self, number: int, delta: CompletionOutput) -> list[Json]:
        """Choices of the chunks that a delta becomes."""

    @property
    def names(self) -> TokenNames:
        return TokenNames(self.tokenizer, bool(self.body.return_tokens_as_token_ids))

    def details(self, delta: CompletionOutput) -> Json:
        """Fields of a delta's first chunk that the body asks for."""
        result: Json = {"token_ids": delta.token_ids} if self.body.return_token_ids else {}
        if (traced := trace(delta, self.tokenizer)) is not None:
            result["outdraft"] = traced
        return result

    def usage(self, done: Iterable[RequestOutput]) -> Json:
        """Counts of tokens, over all prompts and choices."""
        return usage(done)

    async def whole(self) -> Json:
        done = await self.outputs()
        choices = [
            self.choice(number, one, output)
            for number, output in enumerate(done)
            for one in output.outputs
        ]
        result = self._envelope(self.kind, choices) | self.head(done[0])
        return result | {"usage": self.usage(done)} | self._metrics(done)

    async def events(self) -> AsyncGenerator[bytes, None]:
        options = self.body.stream_options or _NO_OPTIONS
        done: dict[int, RequestOutput] = {}
        async with aclosing(self.updates()) as stream:
            async for number, update in stream:
                chunks: list[Json] = []
                if not update.deltas and not self.opens_at_once:
                    yield COMMENT  # the request was accepted
                    continue
                output = update.output
                if number not in done:
                    openings = [self.opening(number, one, output) for one in output.outputs]
                    chunks += [self._chunk([one]) | self.head(output) for one in openings if one]
                done[number] = output
                for delta in update.deltas:
                    chunks += [self._chunk([one]) for one in self.pieces(number, delta)]
                if options.continuous_usage_stats:
                    so_far = {"usage": self.usage(done.values())}
                    chunks = [chunk | so_far for chunk in chunks]
                for chunk in chunks:
                    yield event(chunk)
        last = self._metrics(list(done.values()))
        if options.include_usage:
            last["usage"] = self.usage(done.values())
        if last:
            yield event(self._chunk([]) | last)
        yield DONE

    def _chunk(self, choices: list[Json]) -> Json:
        result = self._envelope(self.chunk_kind, choices)
        options = self.body.stream_options
        return result | {"usage": None} if options and options.include_usage else result

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "choices": choices,
        }

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


async def _merged(
    streams: Sequence[AsyncGenerator[Update]],
) -> AsyncGenerator[tuple[int, Update]]:
    """Updates of all streams as they come, each with the number of its stream."""
    waiting = {ensure_future(anext(one, None)): number for number, one in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=waiting.__getitem__):
                number = waiting.pop(task)
                update = task.result()
                if update is not None:
                    waiting[ensure_future(anext(streams[number], None))] = number
                    yield number, update
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
