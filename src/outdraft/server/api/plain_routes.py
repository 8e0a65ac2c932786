"""The routes that generate nothing: models, tokens, health, version."""

import asyncio
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response

from outdraft.core.errors import RequestError
from outdraft.server.api.bodies import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
    TokenizeTextRequest,
)
from outdraft.server.api.errors import ApiError, draining, engine_dead, unknown_model
from outdraft.server.api.prompts import chat_text, conversation, model_name
from outdraft.server.api.settings import ApiContext


def health_router(context: ApiContext) -> APIRouter:
    """The routes that need no key."""
    router = APIRouter()

    @router.get("/health", operation_id="health")
    async def health() -> Response:
        """200 while requests are taken, 503 when the engine is dead or the server ends."""
        if not context.client.is_alive:
            raise engine_dead(503, context.client.ended_by)
        if context.is_draining():
            raise draining(context.settings.retry_after_s)
        return Response()

    # Some platforms ask by this name.
    router.add_api_route("/ping", health, methods=["GET", "POST"], include_in_schema=False)

    @router.get("/load", operation_id="load")
    async def load() -> dict[str, int]:
        """The number of requests that wait or run, each prompt of a body counted by itself."""
        return {"server_load": context.client.num_unfinished}

    @router.get("/version", operation_id="version")
    async def show_version() -> dict[str, str]:
        return {"version": version("outdraft")}

    return router


def add_profile_routes(router: APIRouter, context: ApiContext) -> None:
    """Traces of the engine's steps, written to a folder of the server's machine, if it has one."""
    if (folder := context.settings.profiler_dir) is None:
        return

    async def profile(path: Path | None) -> None:
        error = await context.client.profile(None if path is None else str(path))
        if error is not None:
            raise ApiError(409, error, "profile_conflict")

    @router.post("/start_profile", operation_id="start_profile")
    async def start() -> dict[str, str]:
        """Begin a trace; the answer says where it will be written."""
        moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
        path = folder / f"outdraft-{moment}.trace.json"
        await profile(path)
        return {"path": str(path)}

    @router.post("/stop_profile", operation_id="stop_profile")
    async def stop() -> Response:
        """End the trace and write it, for chrome://tracing or ui.perfetto.dev."""
        await profile(None)
        return Response()


def add_stored_response_routes(router: APIRouter, context: ApiContext) -> None:
    """OpenAI's routes for answers that it stores: here a clear error."""

    async def refuse(response_id: str) -> Response:
        raise ApiError(
            404,
            f"there is no response {response_id!r}: this server stores none, so an answer is there "
            "once, as the reply to POST /v1/responses",
            "responses_not_stored",
            param="response_id",
        )

    for method, path in (
        ("GET", "/v1/responses/{response_id}"),
        ("DELETE", "/v1/responses/{response_id}"),
        ("POST", "/v1/responses/{response_id}/cancel"),
        ("GET", "/v1/responses/{response_id}/input_items"),
    ):
        router.add_api_route(path, refuse, methods=[method], include_in_schema=False)


def add_model_routes(router: APIRouter, context: ApiContext) -> None:
    created_s = int(time.time())  # when the models were loaded
    names = context.settings.served_model_names

    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": created_s,
            "owned_by": "outdraft",
            "root": names[0],
            "parent": None,
            "max_model_len": context.inputs.max_model_len,
        }

    @router.get("/v1/models", operation_id="list_models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in names]}

    @router.get("/v1/models/{name:path}", operation_id="get_model")
    async def get_model(name: str) -> dict[str, Any]:
        if name not in names:
            raise unknown_model(name)
        return card(name)


def add_token_routes(router: APIRouter, context: ApiContext) -> None:
    def encode(body: TokenizeRequest) -> TokenizeResponse:
        if isinstance(body, TokenizeTextRequest):
            special = body.add_special_tokens is not False
            ids = context.inputs.encode(body.prompt, add_special_tokens=special)
        else:
            text = chat_text(context, conversation(body, body.tools))
            special = bool(body.add_special_tokens)
            ids = context.inputs.encode(text, add_special_tokens=special, field="messages")
        names = None
        tokenizer = context.inputs.tokenizer
        if body.return_token_strs and tokenizer is not None:
            names = [tokenizer.id_to_token(token_id) or "" for token_id in ids]
        limit = context.inputs.max_model_len
        return TokenizeResponse(count=len(ids), max_model_len=limit, tokens=ids, token_strs=names)

    def decode(ids: list[int]) -> DetokenizeResponse:
        tokenizer = context.inputs.tokenizer
        if tokenizer is None:
            raise RequestError("the model came without a tokenizer", "tokens")
        for token_id in ids:
            if token_id >= context.inputs.vocab_size:
                raise RequestError(f"tokens holds {token_id}, which does not exist", "tokens")
        return DetokenizeResponse(prompt=tokenizer.decode(ids, skip_special_tokens=False))

    @router.post("/tokenize", operation_id="tokenize")
    async def tokenize(body: TokenizeRequest) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        model_name(context, body.model)
        return await asyncio.to_thread(encode, body)

    @router.post("/detokenize", operation_id="detokenize")
    async def detokenize(body: DetokenizeRequest) -> DetokenizeResponse:
        """The text of token ids."""
        model_name(context, body.model)
        return await asyncio.to_thread(decode, body.tokens)
