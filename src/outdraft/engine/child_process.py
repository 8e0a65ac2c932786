"""How a process begins that another one starts, and wants for as long as it holds its stdin."""

import os
import pickle
import signal
import sys
import threading
from typing import Any, BinaryIO


def assignment() -> Any:
    """What the other process has pickled for this one; from then on the end of stdin, however it
    comes, ends this process. Signals are for the other one to judge."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    told = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with, args=(sys.stdin.buffer,), daemon=True).start()
    return told


def _end_with(stdin: BinaryIO) -> None:
    stdin.read()
    os._exit(1)  # whatever the main thread is doing
