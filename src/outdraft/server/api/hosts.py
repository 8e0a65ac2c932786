"""Which names a server answers to.

A page of somebody else's can have its own name resolve to 127.0.0.1 and then talk to a server on
its reader's machine (DNS rebinding). Such requests carry the other name in their Host header.
"""

from collections.abc import Iterable
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from outdraft.server.api.errors import error_response, invalid_request


class HostGuard:
    """Refuses requests for other hosts than loopback names and those that are allowed."""

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
                error = invalid_request(message, None, "host_not_allowed", 403)
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def is_loopback(host: str) -> bool:
    """Whether a name or an address, without port and brackets, can only mean this machine."""
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
    """What an operator wrote: an IPv6 address may stand there without brackets."""
    try:
        return str(ip_address(host.lower()))
    except ValueError:
        return _name(host)
