"""Replies that take a while: JSON, or server-sent events. A client that leaves ends their work."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from outdraft.core.errors import OutdraftError
from outdraft.server.api.errors import ApiError, as_api_error
from outdraft.server.api.settings import ApiSettings
from outdraft.server.client import first_ended

_logger = logging.getLogger(__name__)
DONE = b"data: [DONE]\n\n"
COMMENT = b":\n\n"  # says nothing: clients pass over it, and know that the server lives


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


class EventStream(StreamingResponse):
    """Sends events as they come, and comments while none does.

    An error before anything was sent is raised from here: it becomes a reply of its own. A later
    one is the stream's last event, written by `write_error`.
    """

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        write_error: Callable[[ApiError], bytes],
        settings: ApiSettings,
    ) -> None:
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # else nginx holds them
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._events, self._write_error, self._settings = events, write_error, settings
        self._num_sent = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _until_disconnected(receive, self._send_all(send), self._comment(send))

    async def _send_all(self, send: Send) -> None:
        try:
            async with aclosing(self._events) as events:
                async for each in events:
                    await self._send(each, send)
        except OSError:
            raise  # of `send`: the client has left
        except Exception as error:
            if not self._num_sent:
                raise
            if not isinstance(error, OutdraftError):
                _logger.exception("a stream failed")
            reply = as_api_error(error, self._settings.retry_after_s)
            await self._send(self._write_error(reply), send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send(self, chunk: bytes, send: Send) -> None:
        self._num_sent += 1
        if self._num_sent == 1:
            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def _comment(self, send: Send) -> None:
        """Break every silence: proxies and clients end connections on which nothing comes."""
        while True:
            before = self._num_sent
            await asyncio.sleep(self._settings.silence_s)
            if self._num_sent == before:
                await self._send(COMMENT, send)


async def _until_disconnected(
    receive: Receive, work: Coroutine[Any, Any, None], *beside: Coroutine[Any, Any, None]
) -> None:
    """Do the work, and something beside it, but end both at once when the client leaves."""
    working = asyncio.create_task(work)
    others = map(asyncio.create_task, (*beside, _disconnected(receive)))
    if working in await first_ended(working, *others):
        working.result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
