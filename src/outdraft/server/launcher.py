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

import uvicorn

from outdraft.core.errors import ConfigError, OutdraftError
from outdraft.server.bounded_http import bounded_http
from outdraft.server.client import EngineClient

POLL_S = 0.05
LAST_WORDS_S = 1.0  # in which errors are sent to clients after the engine's death
SIGNALS = (signal.SIGTERM, signal.SIGINT)

_logger = logging.getLogger(__name__)

App = Callable[..., Any]  # of ASGI


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


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """Options of connections; the time limits are those of `bounded_http`."""

    ssl_certfile: Path | None  # PEM file; None: without TLS
    ssl_keyfile: Path | None  # PEM file; None: the certificate's file holds the key, too
    header_timeout_s: float
    body_timeout_s: float

    def __post_init__(self) -> None:
        if self.ssl_certfile is None:
            if self.ssl_keyfile is not None:
                raise ConfigError("--ssl-keyfile needs --ssl-certfile")
            return
        try:
            context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            context.load_cert_chain(self.ssl_certfile, self.ssl_keyfile)
        except OSError as error:  # ssl's own errors are among them
            raise ConfigError(
                f"--ssl-certfile {self.ssl_certfile} and --ssl-keyfile {self.ssl_keyfile} hold no "
                f"certificate with its key: {error}"
            ) from None

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"


@dataclass(slots=True)
class Launcher:
    """Serves an app for as long as its engine lives."""

    client: EngineClient
    listener: socket.socket
    drain_timeout_s: float
    before_shutdown: Callable[[], None]  # ends responses that would never end by themselves
    http: HttpOptions
    is_draining: bool = field(default=False, init=False)  # no more requests are taken
    _is_hurried: bool = field(default=False, init=False)
    _signalled: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def serve(self, app: App) -> int:
        """Until a signal, or the engine's death; the exit code of the process.

        The client has been started.
        """
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        http = self.http
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            ws="none",
            http=bounded_http(http.header_timeout_s, http.body_timeout_s),
            timeout_graceful_shutdown=1,
            ssl_certfile=http.ssl_certfile,
            ssl_keyfile=http.ssl_keyfile,
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
