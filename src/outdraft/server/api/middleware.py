"""Middleware that every request passes: a check of its host, its id, and early errors."""

import logging
import re
import time
from collections.abc import Iterable
from ipaddress import ip_address
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outdraft.server.api.errors import ApiError, error_response


class HostGuard:
    """Refuses requests for other hosts than loopback names and those that are allowed.

    A foreign page can have its own name resolve to 127.0.0.1 and then talk to a server
    on its reader's machine (DNS rebinding). Such requests carry the other name in their Host
    header.
    """

    def __init__(self, app: ASGIApp, allowed_hosts: Iterable[str]) -> None:
        self._app = app
        self._allowed = {_allowed_name(host) for host in allowed_hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            host = _name(Headers(scope=scope).get("host", ""))
            if not (is_loopback(host) or host in self._allowed):
                message = (
                    f"the Host header names {host!r}, and this server answers to loopback names "
                    "only: allow more with --allowed-hosts"
                )
                error = ApiError(403, message, "host_not_allowed")
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """True if a name or an address, without port and brackets, can only mean this machine."""
    name = host.lower().removesuffix(".")
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ip_address(name).is_loopback
    except ValueError:
        return False


def _name(host: str) -> str:
    """A Host header's value without its port and brackets."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name.lower() if port == "" or port.startswith(":") else host.lower()
    return host.partition(":")[0].lower()


def _allowed_name(host: str) -> str:
    """The name that an operator wrote: an IPv6 address may stand there without brackets."""
    try:
        return str(ip_address(host.lower()))
    except ValueError:
        return _name(host)


HEADER = "x-request-id"
_ALLOWED = re.compile(r"[!-~]{1,256}")  # visible ASCII: nothing that could break a line of a log

_logger = logging.getLogger(__name__)


class RequestIds:
    """Every request has an id: the client's x-request-id, or a new one. The reply carries it.

    Puts the id into the scope's state and the reply's headers; logs requests if asked to.
    """

    def __init__(self, app: ASGIApp, *, logs: bool) -> None:
        self._app = app
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get(HEADER, "")
        request_id = given if _ALLOWED.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = 500  # of an error of an unknown type: its reply is sent further out
        started_s = time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if self._logs:
                _log(scope, request_id, status, time.monotonic() - started_s)


def _log(scope: Scope, request_id: str, status: int, elapsed_s: float) -> None:
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "elapsed_s": round(elapsed_s, 4),
        "request_id": request_id,
    }
    _logger.info("%s %s: %d after %.3f s, request %s", *fields.values(), extra={"fields": fields})


class EarlyErrors:
    """Sends an error at once, then reads on until the client has sent everything.

    A connection that is closed with unread bytes in it is reset, and the client never sees the
    reply. How long that may take, the connection limits; see bounded_http.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # A client that waits for "100 Continue" sends nothing to an error.
        is_open = "expect" not in Headers(scope=scope)
        is_error = False

        async def receive_tracked() -> Message:
            nonlocal is_open
            message = await receive()
            is_open = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def send_tracked(message: Message) -> None:
            nonlocal is_error
            if message["type"] == "http.response.start":
                is_error = message["status"] >= 400
            is_last = message["type"] == "http.response.body" and not message.get("more_body")
            if is_last and is_error and is_open:
                await send({**message, "more_body": True})
                while is_open:
                    await receive_tracked()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        await self._app(scope, receive_tracked, send_tracked)
