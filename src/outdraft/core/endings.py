"""How processes end, in words."""

import signal

_HINTS = {signal.SIGKILL: ", as the kernel does when memory runs out"}


def ending(code: int) -> str:
    """A process's exit code, or the signal that ended it, in words; `code` as in subprocess."""
    if code >= 0:
        return f"its process ended with exit code {code}"
    try:
        number = signal.Signals(-code)
    except ValueError:
        return f"its process was ended by signal {-code}"
    return f"its process was ended by {number.name}{_HINTS.get(number, '')}"
