"""A server under mixed load for a long time: nothing leaks, nothing is lost.

Starts `outdraft serve` with the embedded pair and sends it requests of all kinds at once: streams
that are read to the end, slowly or not at all, clients that hang up, bad requests, several
sequences, predictions, schemas. Watches the memory of both processes. Exits with 1 if an accepted
request was not answered, a block was leaked, or memory kept growing after the warm-up:
`python benchmarks/soak.py --minutes 20 --json FILE`.
"""

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import httpx
import psutil

from outdraft import assets
from outdraft.bench.report import environment

WARM_UP_SHARE = 0.25  # of the time; buffers and learned texts may grow in it
MAX_GROWTH_MIB = 24.0  # of both processes together, from the warm-up to the end
SAMPLE_EVERY_S = 2.0
CLIENTS = 24
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}},
    "required": ["name"],
    "additionalProperties": False,
}
BAD_BODIES: list[dict[str, object]] = [
    {"prompt": ""},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "max_token": 5},
    {"prompt": "a" * 100_000},
    {"prompt": "a", "model": "another"},
    {"prompt": "a", "regex": "(("},
    {"prompt": [1, 2, 999_999]},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--json", type=Path, help="write the result here")
    args = parser.parse_args()
    command = [sys.executable, "-m", "outdraft.cli", "serve", "--port", "8431"]
    command += ["--kv-cache-memory", "128Mi", "--log-level", "warning"]
    server = subprocess.Popen(command)
    try:
        result = asyncio.run(soak(server, "http://127.0.0.1:8431", 60 * args.minutes))
    finally:
        server.terminate()
        exit_code = server.wait(60)
    result["server_exit_code"] = exit_code
    result["environment"] = environment()
    result["faults"] = faults(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps({k: v for k, v in result.items() if k != "memory"}, indent=1))
    sys.exit(bool(result["faults"]))


def faults(result: dict) -> list[str]:
    """What must not be."""
    found: list[str] = []
    if result["kv_usage_after"] != 0 or result["running_after"] != 0:
        found.append("blocks or requests are left")
    if result["server_exit_code"] != 0:
        found.append(f"the server exited with {result['server_exit_code']}")
    for kind, count in result["outcomes"].items():
        if kind.startswith(("lost", "server error")):
            found.append(f"{count} times: {kind}")
    if result["growth_mib"] > MAX_GROWTH_MIB:
        found.append(f"memory grew by {result['growth_mib']:.1f} MiB after the warm-up")
    return found


async def soak(server: subprocess.Popen[bytes], url: str, seconds: float) -> dict:
    """Load until the time is over, then see what is left."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, limits=limits, timeout=120) as client:
        await _started(client)
        end_s = time.monotonic() + seconds
        outcomes: Counter[str] = Counter()
        clients = [_client(client, random.Random(i), end_s, outcomes) for i in range(CLIENTS)]
        watching = asyncio.create_task(_memory(psutil.Process(server.pid), end_s))
        await asyncio.gather(*clients)
        memory = await watching
        await asyncio.sleep(2)
        page = (await client.get("/metrics")).text
    # By the median of a stretch: single samples depend on what runs at the moment.
    settled = memory[int(len(memory) * WARM_UP_SHARE) :]
    tenth = max(1, len(settled) // 10)
    growth = statistics.median(settled[-tenth:]) - statistics.median(settled[:tenth])
    return {
        "seconds": seconds,
        "clients": CLIENTS,
        "outcomes": dict(outcomes),
        "generation_tokens": _value(page, "outdraft:generation_tokens_total"),
        "running_after": _value(page, "outdraft:num_requests_running"),
        "kv_usage_after": _value(page, "outdraft:kv_cache_usage_perc"),
        "growth_mib": growth,
        "memory": memory,
    }


async def _client(
    client: httpx.AsyncClient, rng: random.Random, end_s: float, outcomes: Counter[str]
) -> None:
    texts = [text for _, text in assets.prompts()]
    acts = [_read_all] * 6 + [_read_slowly, _hang_up, _hang_up, _ask_wrongly, _ask_for_form]
    while time.monotonic() < end_s:
        act = rng.choice(acts)
        body = {
            "prompt": rng.choice(texts)[-rng.randint(20, 900) :],
            "max_tokens": rng.randint(1, 160),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "n": rng.choice([1, 1, 1, 3]),
        }
        try:
            outcomes[await act(client, rng, body)] += 1
        except httpx.HTTPError as error:
            outcomes[f"lost: {type(error).__name__}"] += 1


async def _read_all(client: httpx.AsyncClient, rng: random.Random, body: dict) -> str:
    if rng.random() < 0.2:
        body["prediction"] = {"type": "content", "content": "        return self.value\n" * 8}
    if rng.random() < 0.5:
        answer = await client.post("/v1/completions", json=body)
        return "answered" if answer.status_code == 200 else _status(answer.status_code)
    return await _stream(client, body, 0.0)


async def _read_slowly(client: httpx.AsyncClient, rng: random.Random, body: dict) -> str:
    return await _stream(client, body, rng.uniform(0.01, 0.1))


async def _stream(client: httpx.AsyncClient, body: dict, pause_s: float) -> str:
    ended = 0
    async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        if answer.status_code != 200:
            return _status(answer.status_code)
        async for line in answer.aiter_lines():
            ended += line.count('"finish_reason":"')
            await asyncio.sleep(pause_s)
            if line == "data: [DONE]":
                return "answered" if ended == body["n"] else "lost: a choice did not end"
    return "lost: the stream broke off"


async def _hang_up(client: httpx.AsyncClient, rng: random.Random, body: dict) -> str:
    try:
        async with asyncio.timeout(rng.uniform(0.0, 1.0)):
            await _stream(client, body | {"max_tokens": 400}, 0.0)
    except TimeoutError:
        return "hung up"
    return "answered"


async def _ask_wrongly(client: httpx.AsyncClient, rng: random.Random, body: dict) -> str:
    answer = await client.post("/v1/completions", json=rng.choice(BAD_BODIES))
    refused = answer.status_code in (400, 404) and "message" in answer.json()["error"]
    return "refused" if refused else _status(answer.status_code)


async def _ask_for_form(client: httpx.AsyncClient, rng: random.Random, body: dict) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    answer = await client.post(
        "/v1/completions", json=body | {"n": 1, "max_tokens": 200, "response_format": form}
    )
    if answer.status_code != 200:
        return _status(answer.status_code)
    [choice] = answer.json()["choices"]
    if choice["finish_reason"] == "stop":
        json.loads(choice["text"])
    return "answered"


def _status(code: int) -> str:
    return "asked to come later" if code == 429 else f"server error {code}"


async def _memory(process: psutil.Process, end_s: float) -> list[float]:
    """MiB of the server's processes, now and then."""
    samples: list[float] = []
    while time.monotonic() < end_s:
        family = [process, *process.children(recursive=True)]
        samples.append(sum(one.memory_info().rss for one in family) / 2**20)
        await asyncio.sleep(SAMPLE_EVERY_S)
    return samples


async def _started(client: httpx.AsyncClient) -> None:
    while True:
        try:
            if (await client.get("/health")).status_code == 200:
                return
        except httpx.TransportError:
            await asyncio.sleep(0.2)


def _value(page: str, name: str) -> float:
    return next(float(line.split()[-1]) for line in page.splitlines() if line.startswith(name))


if __name__ == "__main__":
    main()
