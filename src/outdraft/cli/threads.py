"""How many threads compute."""

import os
from collections.abc import Mapping

from outdraft.core.openmp import prepare_openmp


def engine_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of an engine process: as many threads as cores, which spin a little.

    The process that serves HTTP runs on the same cores, so this is the contended case.
    """
    chosen = dict(environ)
    prepare_openmp(chosen)
    chosen.setdefault("OMP_NUM_THREADS", str(num_physical_cores()))
    return chosen


def use_physical_cores(environ: Mapping[str, str]) -> int:
    """Let torch use every core that this process may run on, unless OMP_NUM_THREADS says how many.

    Returns the number of threads. Has to come before models are loaded.
    """
    import torch

    if "OMP_NUM_THREADS" not in environ:
        torch.set_num_threads(num_physical_cores())
    return torch.get_num_threads()


def num_physical_cores() -> int:
    """Cores of this process: two threads on one core would share its vector units."""
    import psutil

    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return cores
