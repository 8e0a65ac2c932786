"""What is checked before a body is read: the key, and whether requests are taken at all.

The body's size is checked while it comes in, whatever its header promises.
"""

import hmac
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import Message

from outdraft.server.api.errors import ErrorReply, draining, invalid_request
from outdraft.server.api.settings import ApiContext

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


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
        error = invalid_request("the API key is missing or wrong", None, "invalid_api_key", 401)
        error.headers = {"WWW-Authenticate": "Bearer"}
        raise error


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
