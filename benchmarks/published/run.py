"""A published model in outdraft's server and in llama.cpp's, asked through HTTP by one client.

    python benchmarks/published/run.py --models FOLDER --peers FOLDER [--quick]

FOLDER of --models has the models' files, or gets them (fetch.py); that of --peers is what
benchmarks/peers/prepare.sh made. In each round all servers start anew, which is timed, and then
take turns, task by task, in an order that is drawn anew. Before each turn the machine's read
bandwidth is taken. Every answer has the same number of tokens, whatever the text. The result is
JSON with all turns, written after each cell; table.py makes tables of it. A failure of outdraft
ends the run; a turn that another server does not answer is written down as failed, and its server
starts anew.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fetch import MODELS, fetch
from servers import LLAMA_CPP, MODEL_NAME, OURS, Limits, Server, Way, started, version, ways
from tasks import TASKS, Cell, cells_of_round

from outdraft.bench.metrics import acceptance_report, load_report
from outdraft.bench.report import environment
from outdraft.bench.serve import run_load
from outdraft.bench.workloads import BenchRequest
from outdraft.cli.command import num_physical_cores
from outdraft.config.benchmarks import Endpoint, TrafficPlan
from outdraft.kernels.native.library import Limits as MachineLimits
from outdraft.kernels.native.library import open_library, shared_team

ROOT = Path(__file__).parents[2]
DRAFTERS = {"coder15": "coder05"}
MAX_LENGTH = 2048
ANSWER_S = 1800.0  # of a turn, at most
NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # the temperature alone shapes probabilities
OWN_BODY = {OURS: {}, LLAMA_CPP: {"cache_prompt": False}}
WARM_UP = "Name three colours."
FLAGS = ("avx", "amx", "fma", "f16c")


def main() -> None:
    args = parsed()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # servers end with this process
    drafter = DRAFTERS.get(args.target)
    names = [args.target, *([drafter] if drafter else [])]
    paths = {name: fetch(name, args.models) for name in names}
    llama_server = args.peers / "envs" / "llama.cpp" / "bin" / "llama-server"
    chosen = [way for way in ways(paths.get(drafter or "")) if is_chosen(way, args.only)]
    limits = Limits(max(args.concurrency), MAX_LENGTH, args.threads)
    result: dict[str, Any] = {
        "model": args.target,
        "drafter": drafter,
        "titles": {name: MODELS[name].title for name in names},
        "file_bytes": paths[args.target].stat().st_size,
        "new_tokens": args.new_tokens,
        "limits": asdict(limits),
        "ways": [asdict(way) for way in chosen],
        "environment": environment() | {"flags": cpu_flags(), "llama.cpp": version(args.peers)},
        "servers": [],
        "turns": [],
        "failures": [],
    }
    read = bandwidth_reader(args.threads)
    folders = {path.parent for path in paths.values()}
    for number in range(args.rounds):
        greedy: dict[Cell, list[str]] = {}
        for at in range(0, len(chosen), args.together):
            with ExitStack() as stack:
                folder = Path(stack.enter_context(TemporaryDirectory()))

                def start(way: Way, stack: ExitStack = stack, folder: Path = folder) -> Server:
                    log = folder / f"{way.name}.log"
                    server = started(way, paths[args.target], limits, llama_server, log)
                    stack.callback(server.stop)
                    say(f"{way.name} ready after {server.start_s:.1f} s")
                    return server

                say(f"round {number}")
                servers = [start(way) for way in chosen[at : at + args.together]]
                for cell, turns in round_of_turns(args, number, servers, start, read):
                    compare_texts(turns, chosen[0], greedy.setdefault(cell, []))
                    result["turns"] += [turn for turn in turns if "error" not in turn]
                    result["failures"] += [turn for turn in turns if "error" in turn]
                    save(result, args.json, folders)
                result["servers"] += [about(one, number) | start_and_memory(one) for one in servers]
                save(result, args.json, folders)
    say(f"{args.json} written: python benchmarks/published/table.py makes tables of it")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, help="folder of the models' files")
    parser.add_argument("--peers", type=Path, required=True, help="what peers/prepare.sh made")
    parser.add_argument("--target", choices=list(MODELS), default="coder15")
    parser.add_argument("--only", nargs="+", default=[""], help="ways whose names have a text")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--temperature", nargs="+", type=float, default=[0.0, 0.7])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--new-tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--threads", type=int, default=num_physical_cores())
    parser.add_argument("--together", type=int, default=len(ways(Path())), help="servers at a time")
    parser.add_argument("--quick", action="store_true", help="one round, two tasks, T=0")
    parser.add_argument("--json", type=Path, help="default: in results/, and in out/ with --quick")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.tasks, args.temperature = 1, ["function", "refactor"], [0.0]
    folder = ROOT / "out" if args.quick else ROOT / "benchmarks" / "results"
    args.json = args.json or folder / f"published-{args.target}.json"
    args.json.parent.mkdir(exist_ok=True)
    return args


def is_chosen(way: Way, texts: list[str]) -> bool:
    return any(text in way.name for text in texts)


def about(server: Server, number: int) -> dict[str, Any]:
    return {"engine": server.way.engine, "method": server.way.method, "round": number}


def start_and_memory(server: Server) -> dict[str, float]:
    return {"start_s": server.start_s, "peak_bytes": server.peak_bytes()}


def round_of_turns(
    args: argparse.Namespace,
    number: int,
    servers: list[Server],
    start: Callable[[Way], Server],
    read: Callable[[], float],
) -> Iterator[tuple[Cell, list[dict[str, Any]]]]:
    """Ask each server each cell; one that does not answer is replaced in `servers`."""
    rng = random.Random(number)
    for one in servers:
        ask(one, Cell("function", 0.0, 1), [WARM_UP], 8, seed=0)
    cells = cells_of_round(number, args.tasks, args.temperature, args.concurrency)
    for cell, prompts in cells.items():
        turns: list[dict[str, Any]] = []
        for at in rng.sample(range(len(servers)), len(servers)):
            one = servers[at]
            state = {"bandwidth_gb_per_s": read(), "load_average": os.getloadavg()[0]}
            try:
                measured = ask(one, cell, prompts, args.new_tokens, seed=number)
            except RuntimeError as error:
                if one.way.engine == OURS:
                    raise
                say(f"{error}; it starts anew")
                measured = {"error": str(error)}
                one.stop()
                servers[at] = start(one.way)
            else:
                say(f"{one.way.name}, {cell.name}: {measured['tokens_per_s']:.1f} tokens/s")
            turns.append(about(one, number) | asdict(cell) | measured | state)
        yield cell, turns


def compare_texts(turns: list[dict[str, Any]], first: Way, greedy: list[str]) -> None:
    """Replace the texts of a cell's turns, where they are greedy, by where they part from those
    of the first way: characters that both begin with, None for the same text.

    Args:
        greedy: the first way's texts, where an earlier call has met them; else filled.
    """
    for turn in turns:
        if (turn["engine"], turn["method"]) == (first.engine, first.method):
            greedy[:] = turn["texts"]
    for turn in turns:
        texts = turn.pop("texts", [])
        if turn["temperature"] == 0 and texts:
            pairs = zip(greedy, texts, strict=True)
            turn["first_differences"] = [first_difference(*pair) for pair in pairs]


def save(result: dict[str, Any], path: Path, folders: set[Path]) -> None:
    """Write what has been measured; where the models lie is left out."""
    text = json.dumps(result, indent=1)
    for folder in folders:
        text = text.replace(f"{folder}/", "")
    path.write_text(text + "\n")


def ask(
    server: Server, cell: Cell, prompts: list[str], new_tokens: int, seed: int
) -> dict[str, Any]:
    """What a turn took, and its answers.

    Raises:
        RuntimeError: a request failed, or an answer has another length.
    """
    body = {"temperature": cell.temperature, "seed": seed, "ignore_eos": True, **NEUTRAL}
    body |= OWN_BODY[server.way.engine]
    endpoint = Endpoint(
        base_url=server.url,
        endpoint="/v1/chat/completions",
        model=MODEL_NAME,
        extra_body=json.dumps(body),
    )
    requests = [BenchRequest(text, new_tokens) for text in prompts]
    traffic = TrafficPlan(max_concurrency=cell.concurrency)
    deadline_s = time.monotonic() + ANSWER_S
    run = asyncio.run(run_load(endpoint, requests, traffic, deadline_s, lambda sample: None))
    for sample in run.samples:
        if sample.error or sample.completion_tokens != new_tokens:
            problem = sample.error or f"{sample.completion_tokens} tokens, not {new_tokens}"
            raise RuntimeError(f"{server.way.name}, {cell.name}: {problem}")
    report = load_report(run.samples, run.duration_s, ("ttft", "tpot"), ())
    accepted = acceptance_report(run.speculation) if run.speculation else {}
    return {
        "tokens_per_s": report["output_throughput"],
        "ttft_ms": report["median_ttft_ms"],
        "tpot_ms": report["median_tpot_ms"],
        "acceptance_length": accepted.get("spec_decode_acceptance_length"),
        "acceptance_rate": accepted.get("spec_decode_acceptance_rate"),
        "texts": [sample.text for sample in run.samples],
    }


def first_difference(one: str, other: str) -> int | None:
    """Characters that both begin with; None: they are the same."""
    if one == other:
        return None
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def bandwidth_reader(threads: int) -> Callable[[], float]:
    """Reads memory with as many threads as the servers compute with, GB/s; the best of three."""
    library = open_library(None)
    if library is None:
        raise SystemExit("there is no compiled library here: run `make lib` first")
    limits = MachineLimits(shared_team(library, threads), is_bf16=False)
    return lambda: max(limits.bandwidth() for _ in range(3)) / 1e9


def cpu_flags() -> list[str]:
    """What the processor has beyond the least, as Linux names it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    flags = next((line.split(":")[1].split() for line in lines if line.startswith("flags")), [])
    return [flag for flag in flags if flag.startswith(FLAGS)]


def say(text: str) -> None:
    print(f"{datetime.now():%H:%M:%S} {text}", flush=True)


if __name__ == "__main__":
    main()
