"""What `set_up_logging` changes for the whole process, put back: other tests read logs, too."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from outdraft.server.logs import LOGGERS


@contextmanager
def loggers_put_back() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in LOGGERS]
    before = [(one.handlers, one.level, one.propagate) for one in loggers]
    try:
        yield
    finally:
        for one, (handlers, level, propagate) in zip(loggers, before, strict=True):
            one.handlers, one.propagate = handlers, propagate
            one.setLevel(level)
