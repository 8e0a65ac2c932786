"""The files of draft heads: small networks that read the target's last hidden state.

Heads belong to one target: their vocabulary and the width of its states must agree.
"""

from collections.abc import Mapping
from typing import Any

from outdraft.core.errors import ConfigError
from outdraft.models.base import LanguageModel


def check_target(raw: Mapping[str, Any], target: LanguageModel, *, hidden_key: str) -> None:
    """Raise ConfigError if config.json names another hidden or vocabulary size than the target's.

    A key that is missing is no contradiction: the shapes of the tensors will tell.
    """
    sizes = {hidden_key: target.config.hidden_size, "vocab_size": target.config.vocab_size}
    for key, expected in sizes.items():
        if raw.get(key) is not None and raw[key] != expected:
            raise ConfigError(
                f"the draft heads are for another model: config.json has {key}={raw[key]!r}, "
                f"the target {expected}"
            )
