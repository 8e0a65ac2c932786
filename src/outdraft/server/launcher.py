"""The life of a server: the engine starts, HTTP is served, signals end it in order.

The first SIGTERM or SIGINT drains: what runs may finish, what comes is refused. The second one ends
everything at once.
"""

import asyncio
import contextlib
import logging
import math
import signal
import socket
import ssl
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from outdraft.core.errors import ConfigError, OutdraftError
from outdraft.server.api.errors import ApiError, error_json
from outdraft.server.client import EngineClient

POLL_S = 0.05
LAST_WORDS_S = 1.0  # in which errors are sent to clients after the engine's death
SIGNALS = (signal.SIGTERM, signal.SIGINT)

_logger = logging.getLogger(__name__)

App = Callable[..., Any]  # of ASGI


def bounded_http(header_timeout_s: float, body_timeout_s: float) -> type[asyncio.Protocol]:
    """A protocol for uvicorn's `http`: HTTP/1.1, and requests have to arrive in time.

    uvicorn itself limits only how long a connection may be idle between two requests.

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

        _waits_for: Any = None  # the client's state
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

        def _limit(self) -> None:
            state = self.conn.their_state
            if state is self._waits_for:
                return
            self._waits_for = state
            if self._timer is not None:
                self._timer.cancel()
            if state in limits:
                self._timer = self.loop.call_later(limits[state][1], self._expire)

        def _expire(self) -> None:
            part, limit_s = limits[self._waits_for]
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
            body = error_json(ApiError(408, message, "request_timeout"))
            headers = [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(body)).encode()),
                (b"connection", b"close"),
            ]
            response = h11.Response(status_code=408, headers=headers, reason=b"Request Timeout")
            for event in (response, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")

    return BoundedHttp


def bind(host: str, port: int) -> socket.socket:
    """A socket that does not listen yet: clients are refused, not left waiting, while models load.

    Raises:
        ConfigError: the address is not to be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # The protocol has to be said: asyncio sends small pieces without delay only where it is TCP.
    result = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    result.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        result.bind((host, port))
    except OSError as error:
        result.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
    return result


def check_certificate(certfile: Path | None, keyfile: Path | None) -> None:
    """Raise ConfigError if these PEM files hold no certificate with its key.

    `keyfile`: None: the certificate's file holds the key, too.
    """
    if certfile is None:
        if keyfile is not None:
            raise ConfigError("--ssl-keyfile needs --ssl-certfile")
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(certfile, keyfile)
    except OSError as error:  # ssl's own errors are among them
        raise ConfigError(
            f"--ssl-certfile {certfile} and --ssl-keyfile {keyfile} hold no certificate with its "
            f"key: {error}"
        ) from None


@dataclass(slots=True)
class Launcher:
    """Serves an app for as long as its engine lives.

    Attributes:
        before_shutdown: ends responses that would never end by themselves.
        ssl_certfile, ssl_keyfile: as `check_certificate` takes them; None: without TLS.
        header_timeout_s, body_timeout_s: of `bounded_http`.
        is_draining: no more requests are taken.
    """

    client: EngineClient
    listener: socket.socket
    drain_timeout_s: float
    before_shutdown: Callable[[], None]
    ssl_certfile: Path | None
    ssl_keyfile: Path | None
    header_timeout_s: float
    body_timeout_s: float
    is_draining: bool = field(default=False, init=False)
    _is_hurried: bool = field(default=False, init=False)
    _signalled: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def serve(self, app: App) -> int:
        """Until a signal, or the engine's death; the exit code of the process.

        The client has been started.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ws="none",
            http=bounded_http(self.header_timeout_s, self.body_timeout_s),
            timeout_graceful_shutdown=1,
            ssl_certfile=self.ssl_certfile,
            ssl_keyfile=self.ssl_keyfile,
        )
        server = _Server(config)
        running = asyncio.create_task(self.client.run())
        serving = asyncio.create_task(server.serve(sockets=[self.listener]))
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait({running, serving, signalled}, return_when=asyncio.FIRST_COMPLETED)
            if signalled.done():
                return await self._drain(server, serving)
            if running.done():
                _report_death(running, self.client.ended_by)
                await asyncio.sleep(LAST_WORDS_S)
            await self._shut_down(server, serving, 1)
            return 1
        finally:
            self.client.close("the server is shutting down")
            signalled.cancel()
            running.cancel()  # it may be waiting for another engine
            await asyncio.gather(running, return_exceptions=True)
            for number in SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        self._is_hurried = self.is_draining
        self.is_draining = True
        self._signalled.set()

    async def _drain(self, server: "_Server", serving: asyncio.Task[None]) -> int:
        deadline_s = time.monotonic() + self.drain_timeout_s
        _logger.info("draining: %d requests run", self.client.num_unfinished)
        while (
            self.client.is_alive
            and self.client.num_unfinished
            and time.monotonic() < deadline_s
            and not self._is_hurried
        ):
            await asyncio.sleep(POLL_S)
        left_s = deadline_s - time.monotonic()
        has_died = not self.client.is_alive
        if left_s <= 0 or self._is_hurried:
            self.client.close("the server is shutting down")
        await self._shut_down(server, serving, max(1, math.ceil(left_s)))
        return 1 if self._is_hurried or has_died else 0

    async def _shut_down(
        self, server: "_Server", serving: asyncio.Task[None], grace_s: int
    ) -> None:
        """Let responses that were begun be sent."""
        self.before_shutdown()
        server.config.timeout_graceful_shutdown = grace_s
        server.should_exit = True
        while not serving.done():
            if self._is_hurried:
                serving.cancel()
            await asyncio.wait({serving}, timeout=POLL_S)
        with contextlib.suppress(asyncio.CancelledError):
            serving.result()


class _Server(uvicorn.Server):
    """Leaves signals to the launcher."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _report_death(running: asyncio.Task[None], ended_by: str | None) -> None:
    error = running.exception()
    if isinstance(error, OutdraftError):
        _logger.error("the engine could not be started again: %s", error)
    elif error is not None:
        _logger.error("the engine has died", exc_info=error)
    else:
        _logger.error("the engine has died%s", f": {ended_by}" if ended_by else "")
