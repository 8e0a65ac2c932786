"""What this machine and this installation are called."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def processor() -> str:
    """The name that Linux gives, else what Python knows; "" if that is nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def installed_version(name: str) -> str | None:
    """The version of an installed distribution; a source tree on the path is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None
