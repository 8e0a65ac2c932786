"""Where a benchmark ran: what a reader needs to judge or repeat a number."""

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from outdraft.loading.machine import installed_version, processor

PACKAGES = ("outdraft", "torch", "tokenizers", "transformers", "httpx")
GIT_TIMEOUT_S = 10


def environment() -> dict[str, Any]:
    """Commit and whether the tree differs from it, None outside of a checkout; host and versions.

    All of it is about the machine that measures: a server may run elsewhere.
    """
    status = _git("status", "--porcelain")
    return {
        "commit": _git("rev-parse", "HEAD"),
        "is_dirty": None if status is None else bool(status),
        "host": platform.node(),
        "platform": platform.platform(),
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_average": list(os.getloadavg()) if hasattr(os, "getloadavg") else None,
        "python": platform.python_version(),
        "versions": {name: installed_version(name) for name in PACKAGES},
    }


def compute() -> dict[str, Any]:
    """What this process computes with; to be added where it is the one that is measured."""
    import torch

    return {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
    }


def _git(*arguments: str) -> str | None:
    """Output of git in the package's folder, if it is tracked there; else None.

    An installed package may lie in a checkout of something else, in which git ignores it.
    """
    folder = Path(__file__).parent
    for command in (("ls-files", "--error-unmatch", "../__init__.py"), arguments):
        try:
            done = subprocess.run(
                ["git", *command], cwd=folder, capture_output=True, text=True, timeout=GIT_TIMEOUT_S
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode != 0:
            return None
    return done.stdout.strip()
