"""The command line: the only place that reads the environment and the arguments."""

import os

from outdraft.cli.threads import prepare_openmp


def main() -> None:
    """The `outdraft` command."""
    # OpenMP reads its settings when torch is imported, so they come before everything else.
    prepare_openmp(os.environ)
    from outdraft.cli.app import app

    app()
