"""Errors that are sent before the request has arrived as a whole, so that clients can read them.

A connection that is closed with unread bytes in it is reset, and the client never sees the reply.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class EarlyErrors:
    """Sends an error at once, then reads on until the client has sent everything.

    How long that may take, the connection limits; see bounded_http.
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
