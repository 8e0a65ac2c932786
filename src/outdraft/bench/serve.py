"""A load test of any OpenAI-compatible server.

At a rate (open loop) requests are due at random times, whatever the server does; latencies count
from then. At a concurrency alone (closed loop) a request is due when an earlier one makes room, so
a slow server is asked less: such latencies say nothing about waiting.
"""

import asyncio
import json
import math
import ssl
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import httpx
import msgspec

from outdraft.bench.metrics import (
    METRICS,
    RequestSample,
    acceptance_report,
    counted_between,
    detailed_report,
    load_report,
    parse_spec_counters,
)
from outdraft.bench.workloads import (
    BenchRequest,
    arrival_times,
    num_distinct_prompts,
    repetition_notes,
)
from outdraft.config.benchmarks import Endpoint, TrafficPlan
from outdraft.config.fields import json_object
from outdraft.core.errors import ConfigError
from outdraft.engine.stats import StatsTotal

MAX_BUNCHED_SHARE = 0.1  # of the chunks, without a word about it

OnDone = Callable[[RequestSample], object]
CONNECT_TIMEOUT_S = 30.0  # the time of a whole test bounds everything else
MAX_ERROR_CHARS = 200  # of a server's message

Clock = Callable[[], float]  # seconds since the start of the test


def request_body(endpoint: Endpoint, request: BenchRequest) -> dict[str, Any]:
    """Raises ConfigError for token ids on the chat route, which takes text only."""
    body: dict[str, Any] = {
        "model": endpoint.model,
        "max_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint.temperature is not None:
        body["temperature"] = endpoint.temperature
    if endpoint.ignore_eos:
        body["ignore_eos"] = True
    if endpoint.extra_body is not None:
        body |= json_object(endpoint.extra_body, "--extra-body")
    if request.prediction is not None:
        body["prediction"] = {"type": "content", "content": request.prediction}
    if not endpoint.endpoint.rstrip("/").endswith("chat/completions"):
        prompt = request.prompt
        return body | {"prompt": prompt if isinstance(prompt, str) else list(prompt)}
    if not isinstance(request.prompt, str):
        raise ConfigError("the chat endpoint takes no token ids: use /v1/completions")
    return body | {"messages": [{"role": "user", "content": request.prompt}]}


class BadStreamError(Exception):
    """The server answered, but not with a whole completion."""


def open_client(endpoint: Endpoint, verify: ssl.SSLContext | bool = True) -> httpx.AsyncClient:
    """A client without a limit on the time of an answer; proxies of the shell are ignored."""
    return httpx.AsyncClient(
        base_url=endpoint.url,
        headers=endpoint.headers,
        timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
        verify=verify,
        trust_env=False,
    )


class Clients:
    """A client for each request under way, with a connection of its own.

    One client for all would look through all its connections whenever a request begins or ends:
    where there are a thousand, that takes longer than the server does.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._verify = httpx.create_ssl_context()  # takes long, so all share it
        self._free: list[httpx.AsyncClient] = []

    @contextmanager
    def lend(self) -> Generator[httpx.AsyncClient]:
        """Lend a client that no other request uses; its connection may be open already."""
        client = self._free.pop() if self._free else open_client(self._endpoint, self._verify)
        try:
            yield client
        finally:
            self._free.append(client)

    async def aclose(self) -> None:
        """Close all connections; none is lent."""
        for client in self._free:
            await client.aclose()


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Samples of a load test, one per request, in order."""

    samples: list[RequestSample]
    duration_s: float
    speculation: StatsTotal | None  # what the server's counters rose by; None if it has none
    num_failed_warmups: int


def check_reporting(metrics: Sequence[str], percentiles: Sequence[float]) -> None:
    """Raise ConfigError unless these are metrics, and percentiles."""
    for name in metrics:
        if name not in METRICS:
            raise ConfigError(f"no metric {name!r}: choose from {', '.join(METRICS)}")
    for percentile in percentiles:
        if not 0 <= percentile <= 100:
            raise ConfigError(f"percentiles are between 0 and 100, got {percentile:g}")


async def run_load(
    endpoint: Endpoint,
    requests: Sequence[BenchRequest],
    traffic: TrafficPlan,
    deadline_s: float,
    on_done: OnDone,
) -> LoadRun:
    """Send everything, the warm-ups first, and wait for all answers.

    Args:
        requests: the warm-ups and those to measure.
        deadline_s: of time.monotonic; what is not answered by then has failed.

    Raises:
        ConfigError: the endpoint takes no such prompts.
    """
    for request in requests:
        request_body(endpoint, request)  # refused before anything is sent
    warm_ups, measured = requests[: traffic.num_warmups], requests[traffic.num_warmups :]
    async with aclosing(Clients(endpoint)) as clients:
        warming = replace(traffic, request_rate=math.inf)
        warmed = await _send_all(clients, endpoint, warm_ups, warming, deadline_s, lambda _: None)
        with clients.lend() as client:
            before = await spec_counters(client)
        started_s = time.monotonic()
        samples = await _send_all(clients, endpoint, measured, traffic, deadline_s, on_done)
        duration_s = time.monotonic() - started_s
        with clients.lend() as client:
            after = await spec_counters(client)
    num_failed = sum(sample.error is not None for sample in warmed)
    return LoadRun(samples, duration_s, counted_between(before, after), num_failed)


async def with_model(endpoint: Endpoint) -> Endpoint:
    """The endpoint with the name of the server's first model, if it has none.

    Raises:
        ConfigError: the server cannot be reached or does not say.
    """
    if endpoint.model:
        return endpoint
    async with open_client(endpoint) as client:
        try:
            response = await client.get("/v1/models", timeout=CONNECT_TIMEOUT_S)
            return replace(endpoint, model=response.raise_for_status().json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{client.base_url.join('/v1/models')} names no model ({type(error).__name__}: "
                f"{error}); is the server up? does it want a key (--header)? else give --model"
            ) from None


def serve_report(
    run: LoadRun,
    requests: Sequence[BenchRequest],
    traffic: TrafficPlan,
    metrics: Sequence[str] = METRICS[:4],
    percentiles: Sequence[float] = (99.0,),
    is_detailed: bool = False,
) -> dict[str, Any]:
    """The result of one run, and what a reader has to know about its numbers.

    Args:
        requests: the warm-ups and those that were measured.
        metrics, percentiles: to report; names as in vLLM.
        is_detailed: every request's own times and text, too.
    """
    result: dict[str, Any] = {
        "num_prompts": len(run.samples),
        "num_distinct_prompts": num_distinct_prompts(requests[traffic.num_warmups :]),
        **asdict(traffic),
        "request_rate": "inf" if math.isinf(traffic.request_rate) else traffic.request_rate,
        **load_report(run.samples, run.duration_s, metrics, percentiles),
        **(detailed_report(run.samples) if is_detailed else {}),
    }
    if run.speculation is not None and run.speculation.num_drafts:
        result |= acceptance_report(run.speculation)
    return result | {"notes": _notes(result, run, traffic)}


def _notes(result: dict[str, Any], run: LoadRun, traffic: TrafficPlan) -> list[str]:
    if traffic.is_closed_loop:
        notes = [
            "closed loop: a request is sent when an earlier one ends, and latencies count from "
            "the sending; how long users would queue is not in them (use --request-rate)"
        ]
    else:
        notes = ["open loop: latencies count from the scheduled arrival, waiting included"]
    per_chunk = result["tokens_per_chunk"]
    if per_chunk is not None and per_chunk > 1.05:
        notes.append(
            f"ITL is the time between chunks, which hold {per_chunk:.2f} tokens on average; TPOT "
            "is per token"
        )
    if (bunched := result["num_bunched_chunks"]) > MAX_BUNCHED_SHARE * result["num_chunks"]:
        notes.append(
            f"{bunched} of {result['num_chunks']} chunks came together with the one before, held "
            "up on the way (a server without TCP_NODELAY?) or sent so: TTFT is too long then, TPOT "
            "and ITL too short; E2EL is right"
        )
    if result["num_missing_usage"]:
        notes.append(
            f"{result['num_missing_usage']} answers came without usage: their chunks were counted "
            "as tokens, too few where a chunk holds several"
        )
    notes += repetition_notes(result["num_distinct_prompts"], result["num_prompts"])
    if run.num_failed_warmups:
        notes.append(f"{run.num_failed_warmups} of the warm-up requests failed")
    if result["failed"]:
        notes.append("failed requests are counted, and left out of all other numbers")
    return notes


async def _send_all(
    clients: Clients,
    endpoint: Endpoint,
    requests: Sequence[BenchRequest],
    traffic: TrafficPlan,
    deadline_s: float,
    on_done: OnDone,
) -> list[RequestSample]:
    times = arrival_times(len(requests), traffic)
    room = asyncio.Semaphore(traffic.max_concurrency or len(requests))
    started_s = time.monotonic()

    def clock() -> float:
        return time.monotonic() - started_s

    async def one(request: BenchRequest, due_s: float) -> RequestSample:
        sample = RequestSample(due_s)
        try:
            async with asyncio.timeout(max(0.0, deadline_s - time.monotonic())):
                await asyncio.sleep(due_s - clock())
                async with room:
                    if traffic.is_closed_loop:
                        sample.due_s = clock()
                    with clients.lend() as client:
                        await send(client, endpoint, request, sample, clock)
        except TimeoutError:
            what = "not sent" if sample.sent_s is None else "unanswered"
            sample.error = f"{what} when the time was over"
            sample.ended_s = clock()
        on_done(sample)
        return sample

    return await asyncio.gather(*map(one, requests, times))


async def send(
    client: httpx.AsyncClient,
    endpoint: Endpoint,
    request: BenchRequest,
    sample: RequestSample,
    clock: Clock,
) -> None:
    """Send one request and book what comes back; a failure is booked, not raised."""
    body = request_body(endpoint, request)
    sample.sent_s = clock()
    try:
        async with client.stream("POST", endpoint.endpoint, json=body) as response:
            if not response.is_success:
                raise BadStreamError(await _refusal(response))
            await _read_events(response, sample, clock)
    except BadStreamError as error:
        sample.error = str(error)
    except httpx.HTTPError as error:
        sample.error = f"{type(error).__name__}: {error}"
    if sample.error is not None or sample.ended_s is None:
        sample.ended_s = clock()


async def spec_counters(client: httpx.AsyncClient) -> StatsTotal | None:
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
            event = msgspec.json.decode(payload, type=dict[str, Any])
        except msgspec.MsgspecError:
            raise BadStreamError("the stream held an event that is no JSON object") from None
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
