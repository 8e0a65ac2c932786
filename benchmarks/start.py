"""From the command to the first token, beside `import torch`.

    python benchmarks/start.py [--repeats 5] [--json out.json]

Runs `outdraft generate` with the embedded model and `python -c "import torch"` in turns, each in a
new process with an empty home directory: nothing is cached but the files that the system keeps in
memory, which both read. Prints the median seconds by the clock until the first byte of text, and
the seconds of computing until the end of the process; the latter say most on a busy machine.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from outdraft.bench.report import environment

COMMANDS = {
    "import torch": ("-c", "import torch; print('.', flush=True)"),
    "to the first token": (
        *("-c", "from outdraft.cli import main; main()"),
        *("generate", "--prompt", "def main(", "--max-tokens", "1", "--temperature", "0"),
    ),
}


@dataclass(frozen=True)
class Start:
    """One process: until its first byte, and what it computed until its end."""

    first_byte_s: float
    cpu_s: float


def start(arguments: tuple[str, ...], home: str) -> Start:
    environ = {**os.environ, "HOME": home, "XDG_CACHE_HOME": f"{home}/cache"}
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *arguments], env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert process.stdout is not None
    first = process.stdout.read(1)
    first_byte_s = time.perf_counter() - began_s
    process.stdout.read()
    process.stdout.close()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode or not first:
        raise SystemExit(f"{' '.join(arguments)} ended with {process.returncode}")
    return Start(first_byte_s, usage.ru_utime + usage.ru_stime)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the numbers here")
    args = parser.parse_args()
    starts: dict[str, list[Start]] = {name: [] for name in COMMANDS}
    for repeat in range(args.repeats + 1):
        for name, arguments in COMMANDS.items():
            with tempfile.TemporaryDirectory() as home:
                one = start(arguments, home)
            if repeat > 0:  # the first one brings files into memory
                starts[name].append(one)
    for name, found in starts.items():
        clock_s = statistics.median(one.first_byte_s for one in found)
        cpu_s = statistics.median(one.cpu_s for one in found)
        print(f"{name:20} {clock_s:5.2f} s by the clock, {cpu_s:5.2f} s of computing")
    if args.json:
        samples = {name: [asdict(one) for one in found] for name, found in starts.items()}
        args.json.write_text(json.dumps({"starts": samples, **environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
