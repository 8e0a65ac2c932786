"""Routes of the page: its files, and the stream of events that its live view reads.

The files are read once and served by name from memory: no request ever becomes a path.
"""

import json
from collections.abc import AsyncIterator, Mapping
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import StreamingResponse

from outdraft.dashboard.feed import LiveFeed

CONTENT_TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}

CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)

HEADERS: Mapping[str, str] = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def dashboard_router(feed: LiveFeed) -> APIRouter:
    """`/`, `/dashboard/events` and `/dashboard/{file}`.

    Call `feed.close()` before the server waits for its connections to end.
    """
    router = APIRouter(include_in_schema=False)  # a page, not a part of the API
    static = files("outdraft.dashboard") / "static"
    assets = {entry.name: entry.read_bytes() for entry in static.iterdir() if entry.is_file()}

    @router.get("/dashboard/events")
    async def events() -> StreamingResponse:  # pyright: ignore[reportUnusedFunction]
        headers = {**HEADERS, "X-Accel-Buffering": "no"}  # nginx would hold events back
        return StreamingResponse(_events(feed), media_type="text/event-stream", headers=headers)

    @router.get("/dashboard/{name}")
    async def asset(name: str) -> Response:
        if name not in assets:
            raise HTTPException(404, "no such file")
        content_type = CONTENT_TYPES[name.rpartition(".")[2]]
        return Response(assets[name], media_type=content_type, headers=dict(HEADERS))

    @router.get("/")
    async def index() -> Response:  # pyright: ignore[reportUnusedFunction]
        return await asset("index.html")

    return router


async def _events(feed: LiveFeed) -> AsyncIterator[str]:
    """`facts` once, then `seconds`: the history first, then a list of one about every second."""
    yield _event("facts", feed.facts)
    async for seconds in feed.stream():
        yield _event("seconds", [second.to_json() for second in seconds])


def _event(name: str, data: object) -> str:
    return f"event: {name}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n"
