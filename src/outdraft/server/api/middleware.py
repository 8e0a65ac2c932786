"""The middleware that every request passes: a check of its host, its id, and early errors."""

import logging
import re
import time
from collections.abc import Iterable
from ipaddress import ip_address
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outdraft.server.api.errors import ApiError, error_response


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


class Door:
    """Every request has an id: the client's x-request-id, or a new one. The reply carries it.

    The id is in the scope's state, too. Requests are logged if asked for.

    Requests for other hosts than loopback names and those that are allowed are refused. A foreign
    page can have its own name resolve to 127.0.0.1 and then talk to a server on its reader's
    machine (DNS rebinding). Such requests carry the other name in their Host header.

    An error is sent at once, then the body is read on until the client has sent everything: a
    connection that is closed with unread bytes in it is reset, and the client never sees the reply.
    How long that may take, the connection limits; see bounded_http.
    """

    def __init__(self, app: ASGIApp, *, logs: bool, allowed_hosts: Iterable[str] | None) -> None:
        """`allowed_hosts`: None: any."""
        self._app = app
        self._logs = logs
        self._allowed = None if allowed_hosts is None else set(map(_allowed_name, allowed_hosts))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(HEADER, "")
        request_id = given if _ALLOWED.fullmatch(given) else uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        # A client that waits for "100 Continue" sends nothing to an error.
        is_open = "expect" not in headers
        status = 500  # of an error of an unknown type: its reply is sent further out
        started_s = time.monotonic()

        async def receive_tracked() -> Message:
            nonlocal is_open
            message = await receive()
            is_open = message["type"] == "http.request" and message.get("more_body", False)
            return message

        async def send_tracked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[HEADER] = request_id
            elif status >= 400 and is_open and not message.get("more_body"):
                await send({**message, "more_body": True})
                while is_open:
                    await receive_tracked()
                message = {"type": "http.response.body", "body": b"", "more_body": False}
            await send(message)

        host = _name(headers.get("host", ""))
        is_allowed = self._allowed is None or is_loopback(host) or host in self._allowed
        app = self._app if is_allowed else _foreign_host(host)
        try:
            await app(scope, receive_tracked, send_tracked)
        finally:
            if self._logs:
                _log(scope, request_id, status, time.monotonic() - started_s)


def _foreign_host(host: str) -> Response:
    message = (
        f"the Host header names {host!r}, and this server answers to loopback names "
        "only: allow more with --allowed-hosts"
    )
    return error_response(ApiError(403, message, "host_not_allowed"))


def _log(scope: Scope, request_id: str, status: int, elapsed_s: float) -> None:
    fields = {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "elapsed_s": round(elapsed_s, 4),
        "request_id": request_id,
    }
    _logger.info("%s %s: %d after %.3f s, request %s", *fields.values(), extra={"fields": fields})
