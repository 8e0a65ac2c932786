"""Replies that take a while: JSON, or server-sent events. A client that leaves ends their work."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from outdraft.core.errors import OutdraftError
from outdraft.server.api.errors import ApiError, as_api_error, error_json

_logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"


def event(value: object, name: str | None = None) -> bytes:
    """One server-sent event with a JSON value."""
    head = f"event: {name}\n".encode() if name is not None else b""
    return head + b"data: " + msgspec.json.encode(value) + b"\n\n"


class JsonLater(Response):
    """Sends the JSON value that some work results in.

    An error of the work is raised from here, before anything was sent.
    """

    def __init__(self, work: Coroutine[Any, Any, object]) -> None:
        super().__init__()
        self._work = work

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def reply() -> None:
            body = msgspec.json.encode(await self._work)
            await Response(body, media_type="application/json")(scope, receive, send)

        await _until_disconnected(receive, reply())


class EventStream(Response):
    """Sends events as they come.

    An error before the first event is raised from here: it becomes a reply of its own. A later one
    is the stream's last event, written by `write_error`.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        retry_after_s: int,
        write_error: Callable[[ApiError], bytes] | None = None,
    ) -> None:
        super().__init__()
        self._events = events
        self._retry_after_s = retry_after_s
        self._write_error = write_error or (
            lambda error: b"data: " + error_json(error) + b"\n\n" + DONE
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_disconnected(receive, self._pump(send))

    async def _pump(self, send: Send) -> None:
        async with aclosing(self._events) as events:
            first = await anext(events)
            await send(_START)
            await send(_body(first))
            try:
                async for each in events:
                    await send(_body(each))
            except OSError:
                raise  # of `send`: the client has left
            except Exception as error:
                if not isinstance(error, OutdraftError):
                    _logger.exception("a stream failed")
                await send(_body(self._write_error(as_api_error(error, self._retry_after_s))))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


_START: Message = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache"),
        (b"x-accel-buffering", b"no"),  # nginx would hold events back
    ],
}


def _body(chunk: bytes) -> Message:
    return {"type": "http.response.body", "body": chunk, "more_body": True}


async def _until_disconnected(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Do the work, but end it at once when the client leaves."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
