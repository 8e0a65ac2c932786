"""Measures outdraft and other engines on the same weights and prompts, cell by cell in turn.

`python benchmarks/peers/run.py --folder FOLDER` measures every case, with --quick those that matter
most. FOLDER is what prepare.sh made. Each engine runs in a process and an environment of its own,
with as many threads. While one is measured, the others are stopped by a signal. Before each
measurement the machine's read bandwidth is taken. The result is JSON with every measurement,
written after each repeat, so an engine or a run that breaks off loses only its own; --resume
measures what is missing. report.py makes a table of it.
"""

import argparse
import contextlib
import functools
import hashlib
import json
import mmap
import os
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
from cells import ENGINES, OURS, Cell, Group, prompts, quick, whole
from protocol import Ask, Spec

from outdraft.bench.report import environment

HERE = Path(__file__).parent
PATIENCE_S = 300.0  # vLLM compiles for a minute when it first meets a model
WARM_UP_TOKENS = 16
READ_BYTES = 2**30
BUSY = "while True: pass"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="what prepare.sh made")
    parser.add_argument("--json", type=Path, default=HERE.parent / "results" / "peers.json")
    parser.add_argument("--quick", action="store_true", help="only the cases that matter most")
    parser.add_argument("--cells", nargs="+", default=[""], help="those whose names have a text")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--add", action="store_true", help="keep what the file has of others")
    parser.add_argument("--resume", action="store_true", help="measure only what the file lacks")
    parser.add_argument("--repeats", type=int, default=9, help="at most")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--outdraft", type=json.loads, default={}, help="more options, as JSON")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # engines end with this process
    keeps = args.json.exists() and (args.add or args.resume)
    result: dict[str, Any] = json.loads(args.json.read_text()) if keeps else {"groups": {}}
    result |= {"threads": args.threads, "environment": environment()}

    def save() -> None:
        # Paths of this machine mean nothing elsewhere.
        text = json.dumps(result, indent=1).replace(f"{args.folder.absolute()}/", "")
        # An answer is a line.
        text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda found: " ".join(found[0].split()), text)
        args.json.write_text(text.replace(f"{HERE.parents[1]}/", ""))

    for group in quick() if args.quick else whole():
        kept = result["groups"].setdefault(group.name, {"engines": {}})
        kept |= {"model": group.model, "method": group.method, "what": group.what}
        todo: dict[str, list[Cell]] = {}
        for name in group.engines:
            measured = kept["engines"].get(name, {"cells": {}})["cells"]
            cells = [cell for cell in group.cells_of(name) if is_chosen(args, group, cell)]
            if args.resume:
                cells = [one for one in cells if lacks(measured.get(one.name, {}), one, name)]
            if cells and name in args.engines.split(","):
                todo[name] = cells
        if todo:
            measure_group(args, group, todo, kept["engines"], save)


def is_chosen(args: argparse.Namespace, group: Group, cell: Cell) -> bool:
    return any(text in f"{group.name}, {cell.name}" for text in args.cells)


def lacks(measured: dict[str, Any], cell: Cell, engine: str) -> bool:
    return len(measured.get("runs", ())) < cell.num_runs(engine)


def measure_group(
    args: argparse.Namespace,
    group: Group,
    todo: dict[str, list[Cell]],
    measured: dict[str, Any],
    save: Callable[[], None],
) -> None:
    """Start the engines, go through the cells once for each repeat, and end them."""
    with contextlib.ExitStack() as ends:
        runners: dict[str, Runner] = {}
        for name, cells in todo.items():
            runners[name] = Runner(name, args, group)
            ends.callback(runners[name].end)
            runners[name].start(group)
            kept = measured.setdefault(name, {"cells": {}})
            kept["about"] = runners[name].about
            kept["cells"] |= {cell.name: asdict(cell) | {"runs": []} for cell in cells}
        for repeat in range(args.repeats):
            for cell in group.cells:
                taking_part = {
                    name: measured[name]["cells"][cell.name]["runs"]
                    for name, cells in todo.items()
                    if cell in cells and repeat < cell.num_repeats(name)
                }
                measure_cell(group, cell, runners, taking_part)
            save()


def measure_cell(
    group: Group, cell: Cell, runners: dict[str, "Runner"], runs: dict[str, list[Any]]
) -> None:
    """Add each engine's next runs: they take turns prompt by prompt, or batch by batch."""
    count = cell.num_prompts if cell.batch == 1 else cell.batch
    warm_up, *asked = prompts(group.model, cell.prompt_tokens, 1 + count)
    for name, before in runs.items():
        if not before:
            runners[name].ask([warm_up] * cell.batch, cell, min(WARM_UP_TOKENS, cell.new_tokens))
    done: dict[str, list[Any]] = {name: [] for name in runs}
    for batch in cell.batches(asked):
        for name in random.sample([*runs], len(runs)):
            run = measure(runners[name], batch, cell, group.what == "busy")
            done[name] += [run] if run else []
    for name, new in done.items():
        runs[name] += new
        rate = cell.batch * cell.new_tokens * len(new) / (sum(run["wall_s"] for run in new) or 1)
        outcome = f"{rate:.1f} tokens/s with prompts" if new else runners[name].about["failure"]
        print(f"{datetime.now():%H:%M:%S} {group.name}, {cell.name}: {name}: {outcome}", flush=True)


def measure(
    runner: "Runner", batch: list[list[int]], cell: Cell, with_steps: bool
) -> dict[str, Any] | None:
    """What a runner answers, with what the machine was like right before; None if it failed."""
    state = {"bandwidth_gb_per_s": read_bandwidth(), "load_average": os.getloadavg()[0]}
    others = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(cell.busy)]
    try:
        reply = runner.ask(batch, cell, cell.new_tokens, with_steps)
    finally:
        for other in others:
            other.kill()
            other.wait()
    for answer in reply["answers"] if reply else []:
        text = json.dumps(answer.pop("token_ids")).encode()
        answer |= {"text": hashlib.sha256(text).hexdigest()[:12]}
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
            target=f"{target}{group.endings.get(name, '')}{ending}",
            drafter=f"{target}_drafter{ending}",
            method=group.method,
            max_depth=max(cell.depth for cell in group.cells),
            threads=args.threads,
            max_requests=max(cell.batch for cell in group.cells),
            max_length=group.max_length,
            options=(args.outdraft if name == OURS else {}) | group.options.get(name, {}),
        )
        self.about: dict[str, Any] = {
            "date": f"{datetime.now():%Y-%m-%d %H:%M}",
            "commit": environment()["commit"],
            "spec": asdict(self._spec),
        }
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
        cell = group.cells[0]
        self.ask(prompts(group.model, cell.prompt_tokens, 1), cell, 1)
        self.about["start_s"] = time.perf_counter() - self._started_s

    def ask(
        self, batch: list[list[int]], cell: Cell, new_tokens: int, with_steps: bool = False
    ) -> Any:
        """The answer to a batch."""
        os.killpg(self._process.pid, signal.SIGCONT)
        ask = Ask(prompts=batch, new_tokens=new_tokens, depth=cell.depth, with_steps=with_steps)
        reply = self._exchange(asdict(ask))
        os.killpg(self._process.pid, signal.SIGSTOP)
        if reply is None:
            return None
        self.about["peak_bytes"] = reply.pop("peak_bytes")
        lengths = {len(answer["token_ids"]) for answer in reply["answers"]}
        if lengths != {new_tokens}:
            self.about["failure"] = f"{lengths} tokens in place of {new_tokens}"
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
    if name == OURS:
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
