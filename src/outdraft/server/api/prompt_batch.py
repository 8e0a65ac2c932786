"""The prompts of one HTTP request: each is a request to the engine, and all are one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from uuid import uuid4

from outdraft.core.errors import ContextLengthError, ReplicaLostError, RequestError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.inputs import EncodedPrompt
from outdraft.server.api.fields import SamplingFields
from outdraft.server.api.params import form_field
from outdraft.server.api.settings import ApiContext
from outdraft.server.client import Update


@dataclass(frozen=True, slots=True)
class PromptBatch:
    """Prompts with the same sampling parameters, and the id of their answer."""

    context: ApiContext
    body: SamplingFields
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams
    request_id: str

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


def prompt_batch(
    context: ApiContext,
    prefix: str,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    body: SamplingFields,
) -> PromptBatch:
    """A batch with its own id, which begins with `prefix`.

    Raises:
        ContextLengthError: the context has no room for all tokens that are asked for.
        RequestError: there would be too many choices.
    """
    for prompt in prompts:
        _check_room(context, prompt, body)
    num_choices, most = len(prompts) * params.n, context.settings.max_choices
    if num_choices > most:
        raise RequestError(
            f"{len(prompts)} prompts with n={params.n} make {num_choices} choices, at most {most} "
            "are allowed",
            "n",
        )
    request_id = f"{prefix}{body.request_id or uuid4().hex}"
    return PromptBatch(context, body, prompts, params, request_id)


def _check_room(context: ApiContext, prompt: EncodedPrompt, body: SamplingFields) -> None:
    names = ("max_completion_tokens", "max_tokens", "max_output_tokens")
    name = next((name for name in names if getattr(body, name, None) is not None), None)
    if name is None:
        return
    max_tokens = getattr(body, name)
    most, used = context.inputs.max_model_len, len(prompt.token_ids)
    if used + max_tokens > most:
        raise ContextLengthError(
            f"This model's maximum context length is {most} tokens. However, the prompt has {used} "
            f"tokens, and {name} asks for {max_tokens} more: {most - used} are left",
            name,
        )


async def _merged(
    streams: Sequence[AsyncGenerator[Update]],
) -> AsyncGenerator[tuple[int, Update]]:
    waiting = {_next(stream): number for number, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in sorted(done, key=lambda task: waiting[task]):
                number = waiting.pop(task)
                update = task.result()
                if update is not None:
                    waiting[_next(streams[number])] = number
                    yield number, update
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


def _next(stream: AsyncGenerator[Update]) -> asyncio.Task[Update | None]:
    async def advance() -> Update | None:
        return await anext(stream, None)

    return asyncio.ensure_future(advance())
