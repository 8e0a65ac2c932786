"""The command line: the only place that reads the arguments and, but for OpenMP's settings, the
environment."""

import gc
import os

from outdraft.core.process import prepare_openmp


def main() -> None:
    """The `outdraft` command."""
    # OpenMP reads its settings when torch is imported, so they come before everything else.
    prepare_openmp(os.environ)
    gc.disable()  # nothing that is imported becomes garbage; to look for it takes 0.3 s
    from outdraft.cli.app import app

    gc.freeze()
    gc.enable()
    app()
