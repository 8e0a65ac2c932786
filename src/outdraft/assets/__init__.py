"""The embedded model pair: a target, a drafter of the same vocabulary, and prompts for both.

They are files beside this module, in Hugging Face's layout; recipes/embedded_pair makes them.
"""

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from outdraft.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class HeldOutPrompt:
    """Text to complete, and the file it was cut from, which neither model was trained on."""

    path: str
    text: str


def target_path() -> Path:
    """Directory of the target's checkpoint.

    Raises:
        ConfigError: this installation came without it; so do the two functions below.
    """
    return _asset("target")


def drafter_path() -> Path:
    """Directory of the drafter's checkpoint."""
    return _asset("drafter")


def prompts() -> list[HeldOutPrompt]:
    """Held-out prompts, in a fixed order."""
    entries = json.loads(_asset("prompts.json").read_text(encoding="utf-8"))
    return [HeldOutPrompt(entry["path"], entry["text"]) for entry in entries]


def _asset(name: str) -> Path:
    path = Path(str(files(__name__))) / name
    if not path.exists():
        raise ConfigError(
            f"this installation has no embedded {name}: recipes/embedded_pair makes it; commands "
            "that take a model do without"
        )
    return path
