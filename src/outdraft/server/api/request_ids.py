"""Every request has an id: the client's x-request-id, or a new one. The reply carries it."""

import logging
import re
import time
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = "x-request-id"
_ALLOWED = re.compile(r"[!-~]{1,256}")  # visible ASCII: nothing that could break a line of a log

_logger = logging.getLogger(__name__)


class RequestIds:
    """Puts the id into the scope's state and the reply's headers; logs requests if asked to."""

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
        status = 500  # of an error that nobody expected: its reply is sent further out
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
