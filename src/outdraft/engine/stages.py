"""What a start does, and how long it takes: a line of the log for each stage."""

import logging
import time
from collections.abc import Generator
from contextlib import contextmanager

_logger = logging.getLogger(__name__)


@contextmanager
def stage(name: str) -> Generator[None]:
    """Log the name and the seconds of a stage that ended; nothing of one that failed."""
    started_s = time.perf_counter()
    yield
    _logger.info("%s: %.2f s", name, time.perf_counter() - started_s)
