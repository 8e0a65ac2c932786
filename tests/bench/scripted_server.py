"""An OpenAI-compatible server that does exactly what a test says, on a port of its own."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


@dataclass(frozen=True)
class Script:
    """One answer.

    Attributes:
        events: pauses in seconds and payloads, sent in order.
        body: instead of events.
        breaks: the connection is cut in the middle of the last event.
    """

    events: Sequence[tuple[float, object]] = ()
    status: int = 200
    body: str | None = None
    breaks: bool = False


@dataclass
class Seen:
    """What the server saw; and its /metrics, which a test may change."""

    port: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    received_s: list[float] = field(default_factory=list)
    metrics: str | None = None
    num_running: int = 0
    most_running: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


Answer = Callable[[int, dict[str, Any]], Script]  # by the number of the request and its body


def completion(
    pieces: Sequence[str],
    gap_s: float = 0.0,
    first_s: float = 0.0,
    usage: tuple[int, int] | None = (5, 3),
    chat: bool = False,
) -> Script:
    """A well-behaved stream: pieces of text, an end, a usage event."""

    def event(text: str, finish: str | None = None) -> dict[str, Any]:
        words = {"delta": {"content": text}} if chat else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": finish, **words}], "usage": None}

    events: list[tuple[float, object]] = []
    if chat:
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        events.append((0.0, role))
    for i, piece in enumerate(pieces):
        events.append((gap_s if i else first_s, event(piece)))
    events.append((0.0, event("", "length")))
    if usage is not None:
        numbers = {"prompt_tokens": usage[0], "completion_tokens": usage[1]}
        events.append((0.0, {"choices": [], "usage": numbers}))
    return Script([*events, (0.0, DONE)])


@contextmanager
def serving(answer: Answer, *, one_at_a_time: bool = False) -> Iterator[Seen]:
    """The server in a thread, for as long as the block lasts."""
    seen = Seen()
    loop = asyncio.new_event_loop()
    started = threading.Event()
    stopping = asyncio.Event()

    async def run() -> None:
        turn = asyncio.Semaphore(1 if one_at_a_time else 10_000)

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await _serve_one(reader, writer, answer, seen, turn)
            except (ConnectionError, asyncio.IncompleteReadError):
                pass
            finally:
                writer.close()

        server = await asyncio.start_server(connected, "127.0.0.1", 0)
        seen.port = server.sockets[0].getsockname()[1]
        started.set()
        await stopping.wait()
        server.close()
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    thread = threading.Thread(target=lambda: loop.run_until_complete(run()))
    thread.start()
    started.wait()
    try:
        yield seen
    finally:
        loop.call_soon_threadsafe(stopping.set)
        thread.join()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()


async def _serve_one(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    answer: Answer,
    seen: Seen,
    turn: asyncio.Semaphore,
) -> None:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().splitlines()
    path = head[0].split()[1]
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    if path == "/metrics":
        status = 404 if seen.metrics is None else 200
        await _respond(writer, Script(status=status, body=seen.metrics or ""), "text/plain")
        return
    if path == "/v1/models":
        models = json.dumps({"data": [{"id": "scripted"}]})
        await _respond(writer, Script(body=models), "application/json")
        return
    number = len(seen.bodies)
    seen.bodies.append(json.loads(body))
    seen.headers.append(headers | {"path": path})
    seen.received_s.append(time.monotonic())
    script = answer(number, seen.bodies[-1])
    seen.num_running += 1
    seen.most_running = max(seen.most_running, seen.num_running)
    try:
        async with turn:
            await _respond(writer, script, "text/event-stream")
    finally:
        seen.num_running -= 1


async def _respond(writer: asyncio.StreamWriter, script: Script, kind: str) -> None:
    writer.write(f"HTTP/1.1 {script.status} X\r\nContent-Type: {kind}\r\n".encode())
    if script.body is not None:
        data = script.body.encode()
        writer.write(f"Content-Length: {len(data)}\r\nConnection: close\r\n\r\n".encode() + data)
        await writer.drain()
        return
    writer.write(b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n")
    for pause_s, payload in script.events:
        await writer.drain()
        await asyncio.sleep(pause_s)
        text = payload if isinstance(payload, str) else json.dumps(payload)
        data = f"data: {text}\n\n".encode()
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
    if script.breaks:
        writer.write(b"ff\r\ndata: {")  # a chunk of 255 bytes of which 7 come
        await writer.drain()
        return
    writer.write(b"0\r\n\r\n")
    await writer.drain()
