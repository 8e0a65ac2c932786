"""One streaming request to an OpenAI-compatible server, and every time it takes."""

import json
import ssl
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from outdraft.bench.metrics import RequestSample, SpecCounters, parse_spec_counters
from outdraft.bench.workloads import BenchRequest
from outdraft.core.errors import ConfigError

CONNECT_TIMEOUT_S = 30.0  # the time of a whole test bounds everything else
MAX_ERROR_CHARS = 200  # of a server's message

Clock = Callable[[], float]  # seconds since the start of the test


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The route of a server that requests go to.

    Attributes:
        path: of the chat route if it ends in chat/completions, else of one for completions.
        body: fields that every request carries beside its own.
    """

    base_url: str
    path: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    body: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_chat(self) -> bool:
        return self.path.rstrip("/").endswith("chat/completions")

    def request_body(self, request: BenchRequest) -> dict[str, Any]:
        """Raises ConfigError for token ids on the chat route, which takes text only."""
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.body,
        }
        if request.prediction is not None:
            body["prediction"] = {"type": "content", "content": request.prediction}
        if not self.is_chat:
            prompt = request.prompt
            return body | {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
        if not isinstance(request.prompt, str):
            raise ConfigError("the chat endpoint takes no token ids: use /v1/completions")
        return body | {"messages": [{"role": "user", "content": request.prompt}]}


class BadStreamError(Exception):
    """The server answered, but not with a whole completion."""


def open_client(
    base_url: str, headers: Mapping[str, str], verify: ssl.SSLContext | bool = True
) -> httpx.AsyncClient:
    """A client without a limit on the time of an answer; proxies of the shell are ignored."""
    return httpx.AsyncClient(
        base_url=base_url,
        headers=dict(headers),
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        verify=verify,
        trust_env=False,
    )


class Clients:
    """A client for each request under way, with a connection of its own.

    One client for all would look through all its connections whenever a request begins or ends:
    where there are a thousand, that takes longer than the server does.
    """

    def __init__(self, base_url: str, headers: Mapping[str, str]) -> None:
        self._base_url = base_url
        self._headers = headers
        self._verify = httpx.create_ssl_context()  # takes long, so all share it
        self._all: list[httpx.AsyncClient] = []
        self._free: list[httpx.AsyncClient] = []

    @contextmanager
    def lend(self) -> Generator[httpx.AsyncClient]:
        """Lend a client that no other request uses; its connection may be open already."""
        if not self._free:
            self._free.append(open_client(self._base_url, self._headers, self._verify))
            self._all.append(self._free[-1])
        client = self._free.pop()
        try:
            yield client
        finally:
            self._free.append(client)

    async def aclose(self) -> None:
        """Close all connections."""
        for client in self._all:
            await client.aclose()


async def send(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    request: BenchRequest,
    sample: RequestSample,
    clock: Clock,
) -> None:
    """Send one request and book what comes back; a failure is booked, not raised."""
    body = endpoint.request_body(request)
    sample.sent_s = clock()
    try:
        async with client.stream("POST", endpoint.path, json=body) as response:
            if not response.is_success:
                raise BadStreamError(await _refusal(response))
            await _read_events(response, sample, clock)
    except BadStreamError as error:
        sample.error = str(error)
    except httpx.HTTPError as error:
        sample.error = f"{type(error).__name__}: {error}"
    if sample.error is not None or sample.ended_s is None:
        sample.ended_s = clock()


async def first_model(client: httpx.AsyncClient) -> str:
    """The name of the server's first model.

    Raises:
        ConfigError: the server cannot be reached or does not say.
    """
    try:
        response = await client.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
        return response.raise_for_status().json()["data"][0]["id"]
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{client.base_url.join('/v1/models')} names no model ({type(error).__name__}: "
            f"{error}); is the server up? does it want a key (--header)? else give --model"
        ) from None


async def spec_counters(client: httpx.AsyncClient) -> SpecCounters | None:
    """The server's counters of speculation now; None if it shows none."""
    try:
        response = await client.get("/metrics", timeout=CONNECT_TIMEOUT_S)
    except httpx.HTTPError:
        return None  # metrics are a bonus; a dead server shows in the requests themselves
    return parse_spec_counters(response.text) if response.is_success else None


async def _refusal(response: httpx.Response) -> str:
    """One line about an answer that is no stream."""
    text = (await response.aread()).decode(errors="replace")
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text
    return f"HTTP {response.status_code}: {' '.join(message.split())[:MAX_ERROR_CHARS]}"


async def _read_events(response: httpx.Response, sample: RequestSample, clock: Clock) -> None:
    is_done = False
    async for line in response.aiter_lines():
        arrived_s = clock()
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            is_done = True
            continue  # reading to the end lets the connection be used again
        try:
            event = json.loads(payload)
        except ValueError:
            raise BadStreamError("the stream held an event that is not JSON") from None
        if not isinstance(event, dict):
            raise BadStreamError("the stream held an event that is no object")
        if (error := event.get("error")) is not None:
            message = error.get("message", error) if isinstance(error, dict) else error
            raise BadStreamError(f"error in the stream: {str(message)[:MAX_ERROR_CHARS]}")
        _book(event, sample, arrived_s)
    if not is_done and sample.finish_reason is None:
        raise BadStreamError("the stream ended early")


def _book(event: dict[str, Any], sample: RequestSample, arrived_s: float) -> None:
    """One event: text counts as a chunk, a chat's first event that names the role does not."""
    for choice in event.get("choices") or ():
        sample.ended_s = arrived_s
        delta = choice.get("delta") or {}
        text = choice.get("text") or delta.get("reasoning_content") or delta.get("content")
        if text:
            sample.chunk_times_s.append(arrived_s)
            sample.text += text
        sample.finish_reason = choice.get("finish_reason") or sample.finish_reason
    usage = event.get("usage") or {}
    sample.prompt_tokens = usage.get("prompt_tokens", sample.prompt_tokens)
    sample.completion_tokens = usage.get("completion_tokens", sample.completion_tokens)
