"""The embedded models: a target, a drafter of the same vocabulary, draft heads, and prompts.

They are files beside this module, in Hugging Face's layout; recipes/embedded_pair makes the pair
and the prompts, recipes/draft_heads the heads.
"""

import json
from importlib.resources import files
from pathlib import Path

from outdraft.core.errors import ConfigError

# By the method that drafts with each.
HEADS = ("eagle3", "medusa", "mlp_speculator", "dspark")
_PAIR_RECIPE, _HEADS_RECIPE = "recipes/embedded_pair", "recipes/draft_heads"


def target_path() -> Path:
    """Directory of the target's checkpoint.

    Raises:
        ConfigError: this installation came without it; so do the functions below.
    """
    return _asset("target", _PAIR_RECIPE)


def drafter_path() -> Path:
    """Directory of the drafter's checkpoint."""
    return _asset("drafter", _PAIR_RECIPE)


def head_path(method: str) -> Path:
    """Directory of the target's draft head for one of HEADS."""
    assert method in HEADS, method
    return _asset(method, _HEADS_RECIPE)


def available_heads() -> tuple[str, ...]:
    """Those of HEADS that this installation has."""
    return tuple(method for method in HEADS if _place(method).exists())


def prompts() -> list[tuple[str, str]]:
    """Texts to complete, in a fixed order, each after the path of the file that it was cut from;
    neither model was trained on them."""
    entries = json.loads(_asset("prompts.json", _PAIR_RECIPE).read_bytes())
    return [(entry["path"], entry["text"]) for entry in entries]


def _asset(name: str, recipe: str) -> Path:
    path = _place(name)
    if not path.exists():
        raise ConfigError(
            f"this installation has no embedded {name}: {recipe} makes it; commands that take a "
            "model do without"
        )
    return path


def _place(name: str) -> Path:
    return Path(str(files(__name__))) / name
