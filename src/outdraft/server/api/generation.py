"""One HTTP request's generation: as many engine requests as it has prompts, streamed as one."""

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
class Generation:
    """What the engine is asked for."""

    request_id: str
    prompts: Sequence[EncodedPrompt]
    params: SamplingParams  # of every prompt
    priority: int
    form_field: str  # the body's field that asks for a form of the output, if one does


def new_generation(
    context: ApiContext,
    prefix: str,
    prompts: Sequence[EncodedPrompt],
    params: SamplingParams,
    body: SamplingFields,
) -> Generation:
    """A generation with its own id.

    Raises:
        ContextLengthError: the context has no room for all tokens that are asked for.
        RequestError: there would be too many choices.
    """
    for prompt in prompts:
        _check_room(context, prompt, body)
    request_id = f"{prefix}{body.request_id or uuid4().hex}"
    num_choices, most = len(prompts) * params.n, context.settings.max_choices
    if num_choices > most:
        raise RequestError(
            f"{len(prompts)} prompts with n={params.n} make {num_choices} choices, at most {most} "
            "are allowed",
            "n",
        )
    return Generation(request_id, prompts, params, body.priority or 0, form_field(body))


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


async def updates(
    context: ApiContext, generation: Generation
) -> AsyncGenerator[tuple[int, Update]]:
    """Every update with the number of its prompt. Closing it early aborts all that runs.

    Raises:
        RequestError, CapacityError, GenerationError, EngineDeadError: as EngineClient.generate.
    """
    async with AsyncExitStack() as stack:
        streams: list[AsyncGenerator[Update]] = []
        for number, prompt in enumerate(generation.prompts):
            stream = context.client.generate(
                f"{generation.request_id}-{number}", prompt, generation.params, generation.priority
            )
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
            raise RequestError(str(error), generation.form_field) from error


async def outputs(context: ApiContext, generation: Generation) -> list[RequestOutput]:
    """The finished outputs, one a prompt. Nothing was sent before them, so a lost replica is nobody
    else's concern: another one begins anew.

    Raises:
        RequestError, CapacityError, GenerationError, EngineDeadError: as EngineClient.generate.
    """
    try:
        return await _outputs(context, generation)
    except ReplicaLostError:
        return await _outputs(context, generation)


async def _outputs(context: ApiContext, generation: Generation) -> list[RequestOutput]:
    last: dict[int, RequestOutput] = {}
    async with aclosing(updates(context, generation)) as stream:
        async for number, update in stream:
            last[number] = update.output
    return [last[number] for number in range(len(generation.prompts))]


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
