"""Measures outdraft and other engines on the same weights and prompts, cell by cell in turn.

`python benchmarks/peers/run.py --folder FOLDER --quick` measures what matters most in some ten
minutes; without --quick everything. FOLDER is what prepare.sh made. Each engine runs in a process
and an environment of its own, with as many threads. While one is measured, the others are stopped
by a signal. Before each measurement the machine's read bandwidth is taken. The result is JSON with
every measurement, written after each group; report.py makes a table of it.
"""

import argparse
import contextlib
import functools
import hashlib
import itertools
import json
import mmap
import os
import random
import select
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from cells import ENGINES, Group, prompts, quick, whole
from protocol import Spec

from outdraft.bench.environment import environment

HERE = Path(__file__).parent
PATIENCE_S = 1800.0
WARM_UP_TOKENS = 16
READ_BYTES = 2**30
BUSY = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="what prepare.sh made")
    parser.add_argument("--json", type=Path, default=HERE.parent / "results" / "peers.json")
    parser.add_argument("--quick", action="store_true", help="only the cells that matter most")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--only", default="", help="groups whose names have this: small/plain")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=128, help="most of an output")
    parser.add_argument("--outdraft", type=json.loads, default={}, help="more options, as JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines end with this process
    about = {"date": f"{datetime.now():%d %B %Y %H:%M}", "environment": environment()}
    groups: list[dict[str, Any]] = []
    for group in quick() if args.quick else whole():
        if args.only in f"{group.kind}/{group.model}/{group.method}":
            groups.append(measure_group(args, group))
            result = about | {"threads": args.threads, "groups": groups}
            # Where the folder is matters to nobody else.
            text = json.dumps(result, indent=1).replace(f"{args.folder.absolute()}/", "")
            args.json.write_text(text)


def measure_group(args: argparse.Namespace, group: Group) -> dict[str, Any]:
    """Start the engines, measure each cell with all of them in turn, and end them."""
    runners: dict[str, Runner] = {}
    cells: list[dict[str, Any]] = []
    with contextlib.ExitStack() as ends:
        for name in group.engines:
            if name in args.engines.split(","):
                runners[name] = Runner(name, args, group)
                ends.callback(runners[name].end)
                runners[name].start(group)
        for where in itertools.product(group.prompt_lengths, group.batches, group.busy):
            cells += measure_cell(args, group, runners, where)
    about = {name: runner.about for name, runner in runners.items()}
    return asdict(group) | {"runners": about, "cells": cells}


def measure_cell(
    args: argparse.Namespace,
    group: Group,
    runners: dict[str, "Runner"],
    where: tuple[int, int, int],
) -> list[dict[str, Any]]:
    """One cell of every engine: they take turns prompt by prompt, or batch by batch."""
    length, batch, busy = where
    max_tokens = min(group.max_tokens, args.max_tokens)
    *asked, warm_up = prompts(group.model, length, 1 + (group.num_prompts if batch == 1 else batch))
    batches = [[prompt] for prompt in asked] if batch == 1 else [asked]
    can = [n for n in runners if n != "transformers" or batch == 1 or group.method == "plain"]
    runs: dict[str, list[Any]] = {name: [] for name in can}
    for name in can:
        runners[name].ask([warm_up] * batch, min(WARM_UP_TOKENS, max_tokens), False)
    for one in batches * args.repeats:
        for name in random.sample(can, len(can)):
            run = measure(runners[name], one, max_tokens, group.kind == "busy", busy)
            runs[name] += [run] if run else []
    for name, done in runs.items():
        rate = batch * max_tokens * len(done) / (sum(run["wall_s"] for run in done) or 1)
        told = f"{rate:.1f} tokens/s with prompts" if done else runners[name].about["failure"]
        print(group.kind, group.model, group.method, group.depth, *where, name, told, flush=True)
    about = {"prompt_tokens": length, "batch": batch, "busy": busy}
    return [about | {"engine": name, "runs": done} for name, done in runs.items()]


def measure(
    runner: "Runner", batch: list[list[int]], max_tokens: int, with_steps: bool, busy: int
) -> dict[str, Any] | None:
    """What a runner answers, with what the machine was like right before; None if it failed."""
    state = {"bandwidth_gb_per_s": read_bandwidth(), "load_average": os.getloadavg()[0]}
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)]
    try:
        reply = runner.ask(batch, max_tokens, with_steps)
    finally:
        for other in others:
            other.kill()
            other.wait()
    for answer in reply["answers"] if reply else []:
        text = json.dumps(answer.pop("token_ids")).encode()
        answer |= {"num_tokens": max_tokens, "text": hashlib.sha256(text).hexdigest()[:12]}
        if not with_steps:
            del answer["step_s"]
    return state | reply if reply else None


class Runner:
    """An engine's process: runs while it is asked, and is stopped by a signal otherwise.

    When it fails, `about` says how, and from then on it answers None.
    """

    def __init__(self, name: str, args: argparse.Namespace, group: Group) -> None:
        python, environ, ending = place(name, args.folder.absolute())
        target = args.folder.absolute() / "models" / group.model
        self._spec = Spec(
            target=f"{target}{group.variants.get(name, '')}{ending}",
            drafter=f"{target}_drafter{ending}",
            method=group.method,
            depth=group.depth,
            threads=args.threads,
            max_requests=max(group.batches),
            max_length=group.max_length,
            options=(args.outdraft if name == "outdraft" else {}) | group.options.get(name, {}),
        )
        self.about: dict[str, Any] = {"spec": asdict(self._spec)}
        self._started_s = time.perf_counter()
        with (args.folder / f"{name}.log").open("a") as errors:
            self._process = subprocess.Popen(
                [python, str(HERE / f"run_{name.replace('.', '_')}.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=os.environ | environ,
                text=True,
                start_new_session=True,  # a group of its own, for signals
            )

    def start(self, group: Group) -> None:
        """Load the model and answer one prompt."""
        self.about |= self._exchange(asdict(self._spec)) or {}
        self.ask(prompts(group.model, min(group.prompt_lengths), 1), 1, False)
        self.about["start_s"] = time.perf_counter() - self._started_s

    def ask(self, batch: list[list[int]], max_tokens: int, with_steps: bool) -> Any:
        """The answer to a batch."""
        os.killpg(self._process.pid, signal.SIGCONT)
        reply = self._exchange([batch, max_tokens, with_steps])
        os.killpg(self._process.pid, signal.SIGSTOP)
        if reply is None:
            return None
        self.about["peak_bytes"] = reply.pop("peak_bytes")
        lengths = {len(answer["token_ids"]) for answer in reply["answers"]}
        if lengths != {max_tokens}:
            self.about["failure"] = f"{lengths} tokens in place of {max_tokens}"
        return None if "failure" in self.about else reply

    def end(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _exchange(self, values: Any) -> Any:
        line = ""
        if "failure" not in self.about:
            with contextlib.suppress(OSError):  # it has ended, and the answer will say so
                print(json.dumps(values), file=self._process.stdin, flush=True)
            assert self._process.stdout is not None
            if select.select([self._process.stdout], [], [], PATIENCE_S)[0]:
                line = self._process.stdout.readline()
            if not line:
                self.about["failure"] = f"it ended or was silent for {PATIENCE_S} s"
        return json.loads(line) if line else None


def place(name: str, folder: Path) -> tuple[str, dict[str, str], str]:
    """An engine's Python, what its environment adds, and how the names of its models end."""
    home = folder / "envs" / name
    if name == "outdraft":
        return sys.executable, {}, ""
    if name == "llama.cpp":
        return sys.executable, {"LLAMA_SERVER": str(home / "bin" / "llama-server")}, ".gguf"
    libraries = [home / "lib" / "libtcmalloc_minimal.so", home / "lib" / "libiomp5.so"]
    preload = ":".join(str(library) for library in libraries if library.exists())
    environ = {"PYTHONPATH": "", "LD_PRELOAD": preload if name == "vllm" else ""}
    return str(home / "bin" / "python"), environ, "-openvino" if name == "openvino" else ""


def read_bandwidth() -> float:
    """GB/s at which two threads read 1 GiB in huge pages, the best of three times."""
    parts, pool = memory()
    seconds: list[float] = []
    for _ in range(3):
        started_s = time.perf_counter()
        list(pool.map(np.bitwise_or.reduce, parts))
        seconds.append(time.perf_counter() - started_s)
    return READ_BYTES / min(seconds) / 1e9


@functools.cache
def memory() -> tuple[list[Any], ThreadPoolExecutor]:
    region = mmap.mmap(-1, READ_BYTES)
    region.madvise(mmap.MADV_HUGEPAGE)
    data = np.frombuffer(region, np.int64)
    data[:] = 1
    return np.array_split(data, 2), ThreadPoolExecutor(2)


if __name__ == "__main__":
    main()
