"""uvicorn's HTTP/1.1 connections, with a time limit for requests that a client has begun to send.

uvicorn itself limits only how long a connection may be idle between two requests.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outdraft.server.api.errors import error_json, invalid_request


def bounded_http(header_timeout_s: float, body_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol for uvicorn's `http`.

    Args:
        header_timeout_s: from the opening of a connection, or the first byte of a later request,
            to the end of its headers.
        body_timeout_s: from there to the end of its body.
    """
    limits: dict[Any, tuple[str, float]] = {
        h11.IDLE: ("headers", header_timeout_s),
        h11.SEND_BODY: ("body", body_timeout_s),
    }

    class BoundedHttp(H11Protocol):
        """Closes a connection whose request is not complete in time, with status 408."""

        _waits_for: Any = None  # the client's state that the timer is for
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._limit()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._limit()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.conn.their_state is h11.SEND_BODY:  # it came before the last answer was given
                self._limit()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _limit(self) -> None:
            state = self.conn.their_state
            if state is self._waits_for:
                return
            self._stop_timer()
            if state in limits and not self.transport.is_closing():
                self._waits_for = state
                self._timer = self.loop.call_later(limits[state][1], self._expire)

        def _stop_timer(self) -> None:
            self._waits_for = None
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _expire(self) -> None:
            part, limit_s = limits[self._waits_for]
            self._stop_timer()
            if self.transport.is_closing():
                return
            is_body = self.conn.their_state is h11.SEND_BODY
            has_begun = is_body or bool(self.conn.trailing_data[0])
            if has_begun and self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
                self._reply(f"the request's {part} did not arrive within {limit_s:g} s")
            if is_body:  # the route that reads it gets an error
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.close()

        def _reply(self, message: str) -> None:
            body = error_json(invalid_request(message, None, "request_timeout", 408))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=408, headers=headers, reason=b"Request Timeout")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

    return BoundedHttp
