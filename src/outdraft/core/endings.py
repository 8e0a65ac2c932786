"""How processes end, in words."""

import signal

STOOD_STILL = 76  # code of a process that ended itself, since a step of it did not go on
_HINTS = {signal.SIGKILL: ", as the kernel does when memory runs out"}


def ending(code: int) -> str:
    """A process's exit code, or the signal that ended it, in words; `code` as in subprocess."""
    if code == STOOD_STILL:
        return "its process stood still in a step"
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"its process was ended by signal {-code}"
    return f"its process was ended by {number.name}{_HINTS.get(number, '')}"
