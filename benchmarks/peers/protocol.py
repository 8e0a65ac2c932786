"""How the driver and the runner of an engine talk: a line of JSON each way, on stdin and stdout.

The first line says what to load, a `Spec`; the answer, with which versions. Each further line is an
`Ask`, requests that begin together; the answer has their tokens and times. This file runs in the
environment of each engine and needs only Python.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Spec:
    """What a runner loads."""

    target: str  # a checkpoint, or what convert.py made of it
    drafter: str
    method: str  # "plain", "draft_model", "ngram", or another one that only this engine has
    max_depth: int  # drafts a step, at most
    threads: int
    max_requests: int  # at once
    max_length: int  # tokens of each, prompt and output
    options: dict[str, Any]  # of the engine, by its own names


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Greedy requests that begin together; a text's end does not end them."""

    prompts: list[list[int]]
    new_tokens: int  # of each
    depth: int  # drafts a step, at most those of the `Spec`
    with_steps: bool  # tell the time of each token; costs some engines time


@dataclass(kw_only=True)
class Answer:
    """One request; times are seconds since its batch began."""

    token_ids: list[int] = field(default_factory=list)
    first_s: float = 0.0
    last_s: float = 0.0
    rounds: int = 0  # steps that brought tokens behind the first ones
    step_s: list[float] = field(default_factory=list)  # of each round, where the engine shows it

    def add(self, token_ids: list[int], now_s: float) -> None:
        """Tokens arrived."""
        if self.token_ids:
            self.rounds += 1
            self.step_s.append(now_s - self.last_s)
        else:
            self.first_s = now_s
        self.token_ids += token_ids
        self.last_s = now_s


Run = Callable[[Ask], list[Answer]]
Grown = Iterator[tuple[int, list[int]]]  # requests by their numbers, and their new tokens
_numbers = count()


def run_steps(
    ask: Ask, add: Callable[[int, list[int]], Any], step: Callable[[], Grown]
) -> list[Answer]:
    """The answers of an engine whose steps the runner calls itself; no number comes twice."""
    answers = {next(_numbers): Answer() for _ in ask.prompts}
    started_s = time.perf_counter()
    for number, prompt in zip(answers, ask.prompts, strict=True):
        add(number, prompt)
    while any(len(answer.token_ids) < ask.new_tokens for answer in answers.values()):
        for number, token_ids in step():
            answers[number].add(token_ids, time.perf_counter() - started_s)
    return [*answers.values()]


def serve(
    load: Callable[[Spec], tuple[Run, dict[str, Any]]],
    packages: list[str],
    children: list[int],
    **versions: str,
) -> None:
    """Answer the driver until stdin ends. What libraries print on stdout goes to stderr.

    `load` gives what runs a batch, and the settings to keep with the result.
    """
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    run, settings = load(Spec(**json.loads(sys.stdin.readline())))
    versions |= {name: version(name) for name in packages}
    print(json.dumps({"versions": versions, "settings": settings}, default=str), file=replies)
    for line in sys.stdin:
        started_s = time.perf_counter()
        answers = run(Ask(**json.loads(line)))
        wall_s = time.perf_counter() - started_s
        peak = sum(peak_bytes(process) for process in [os.getpid(), *children])
        answered = [asdict(answer) for answer in answers]
        reply = {"wall_s": wall_s, "peak_bytes": peak, "answers": answered}
        print(json.dumps(reply), file=replies)


def peak_bytes(process: int) -> int:
    """The most memory that a process ever had resident."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
