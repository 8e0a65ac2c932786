"""A torch profiler trace of an engine's steps, with a named range around each phase.

The ranges are put around methods of this one engine from outside, for as long as the trace lasts:
the engine itself has no code for it.
"""

import functools
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from outdraft.engine.engine import Engine
from outdraft.runner.parallel_runner import ParallelRunner


@contextmanager
def traced(engine: Engine, path: Path) -> Generator[None, None, None]:
    """Trace all steps of the block; the file is Chrome's trace format."""
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    path.parent.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        for owner, method, name in _phases(engine):
            stack.enter_context(_ranged(owner, method, name))
        with profile(activities=activities) as profiler:
            yield
    profiler.export_chrome_trace(str(path))


def _phases(engine: Engine) -> list[tuple[object, str, str]]:
    """List (owner, method, phase); drafts come from the host's sources and from the model. With
    several ranks only this one is traced."""
    runner = engine.runner
    if isinstance(runner, ParallelRunner):
        runner = runner.own
    return [
        (engine, "step", "step"),
        (engine.drafting, "choose", "draft"),
        (engine.scheduler, "schedule", "schedule"),
        (runner, "_drafts", "draft"),
        (runner, "_forward", "verify"),
        (runner, "_verify", "sample"),
        (runner, "_keep", "sample"),
        (engine.scheduler, "commit", "commit"),
    ]


@contextmanager
def _ranged(owner: object, method: str, name: str) -> Generator[None, None, None]:
    """Wrap a method of one object in a named range."""
    original: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(original)
    def ranged(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return original(*arguments, **options)

    setattr(owner, method, ranged)
    try:
        yield
    finally:
        delattr(owner, method)
