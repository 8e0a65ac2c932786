"""Settings of the routes, and the router that checks the key before a body is read.

The body's size is checked while it comes in, whatever its header says.
"""

import hmac
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Message

from outdraft.engine.inputs import InputProcessor
from outdraft.server.api.errors import ApiError, ErrorReply, draining
from outdraft.server.client import EngineClient
from outdraft.text.chat import ChatTemplate

Handler = Callable[[Request], Coroutine[Any, Any, Response]]
ToolCallFormat = Literal["hermes", "llama3_json", "qwen2_5_coder"]
ReasoningFormat = Literal["qwen3", "deepseek_r1"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """Names, keys and limits of the API.

    Attributes:
        served_model_names: what requests may name; the first is what answers say.
        api_key: None: everybody may ask.
        tool_call_parser: how the model writes its calls; None: tools are refused.
        auto_tool_choice: whether the model may decide by itself to call; False: only requests that
            force a call may bring tools.
        reasoning_parser: how the model writes what it thinks before it answers; None: that stays
            part of the answer.
        allowed_origins: web pages of other hosts that may ask (CORS).
        allowed_hosts: names that requests may be for, beside loopback ones; None: any.
        root_path: prefix of all paths that a proxy takes off.
        log_requests: whether each request leaves a line in the log.
        default_sampling: values, by names of SamplingParams, of fields that a body leaves open.
        profiler_dir: where profiles are written; None: none can be taken.
        max_choices: answers of one request, n times the number of prompts.
        max_logprobs: most likely tokens a position.
    """

    served_model_names: tuple[str, ...]
    api_key: str | None = None
    tool_call_parser: ToolCallFormat | None = None
    auto_tool_choice: bool = True
    reasoning_parser: ReasoningFormat | None = None
    allowed_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] | None = None
    root_path: str = ""
    log_requests: bool = False
    default_sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    profiler_dir: Path | None = None
    max_body_bytes: int = 8 * 1024 * 1024
    max_choices: int = 128
    max_logprobs: int = 20
    max_stop_strings: int = 16
    max_stop_length: int = 256  # characters of one stop string
    max_bad_words: int = 1024
    max_bad_word_length: int = 256  # characters of one
    max_schema_bytes: int = 64 * 1024  # of a JSON schema, regular expression or grammar
    retry_after_s: int = 1  # value of the header Retry-After
    silence_s: float = 5.0  # after this time without an event a stream sends a comment


@dataclass(frozen=True, slots=True)
class ApiContext:
    """The engine, the texts and the settings that every route uses."""

    client: EngineClient
    inputs: InputProcessor  # of the engine's model; its tokenizer encodes prompts, in threads
    chat_template: ChatTemplate | None  # None: the model cannot chat, and conversations are refused
    settings: ApiSettings
    # asked for every request; while it says yes, new ones get a 503
    is_draining: Callable[[], bool] = lambda: False


def guarded_router(context: ApiContext) -> APIRouter:
    """A router all of whose routes are guarded."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Handler:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                check_key(request, context.settings.api_key)
                if request.method == "POST" and context.is_draining():
                    raise draining(context.settings.retry_after_s)
                return await handle(BoundedRequest(request, context.settings.max_body_bytes))

            return guarded

    return APIRouter(
        route_class=GuardedRoute,
        responses={"default": {"model": ErrorReply, "description": "Anything but a success."}},
    )


def check_key(request: Request, api_key: str | None) -> None:
    """Compare keys in a time that does not depend on where they differ.

    Raises:
        ApiError: the key is missing or wrong.
    """
    if api_key is None:
        return
    given = request.headers.get("authorization", "")
    scheme, _, key = given.partition(" ")
    same = hmac.compare_digest(key.strip().encode("latin-1"), api_key.encode())
    if scheme.lower() != "bearer" or not same:
        message, headers = "the API key is missing or wrong", {"WWW-Authenticate": "Bearer"}
        raise ApiError(401, message, "invalid_api_key", headers=headers)


class BoundedRequest(Request):
    """A request whose body cannot be read past a limit, and whose JSON is read strictly."""

    def __init__(self, request: Request, max_body_bytes: int) -> None:
        """
        Raises:
            HTTPException: its header says that it is too large.
        """
        self._too_large = HTTPException(413, f"the body has more than {max_body_bytes:,} bytes")
        self._room = max_body_bytes
        self._receive_any = request.receive
        super().__init__(request.scope, self._receive_bounded)
        promised = request.headers.get("content-length", "")
        if promised.isdecimal() and int(promised) > max_body_bytes:
            raise self._too_large

    async def json(self) -> Any:
        """The body's value. Numbers beyond all range and broken Unicode are errors here."""
        try:
            return msgspec.json.decode(await self.body())
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise HTTPException(400, "the body is not valid JSON") from error

    async def _receive_bounded(self) -> Message:
        message = await self._receive_any()
        self._room -= len(message.get("body", b""))
        if self._room < 0:
            raise self._too_large
        return message
