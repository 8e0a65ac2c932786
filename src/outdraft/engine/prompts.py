"""The forms in which a prompt may come: a text, token ids, or one of vLLM's two dicts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np

from outdraft.core.errors import RequestError, did_you_mean

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = "a text, token ids, or a dict with 'prompt' or 'prompt_token_ids'"


class TextPrompt(TypedDict):
    """A text. Prompts with different salts share no blocks of the prefix cache."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids; `prompt` is the text that they stand for, for whoever reads the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt that was checked and made ids of; `text` is None if it came as ids.

    token_ids: int32 [num_tokens].
    """

    text: str | None
    token_ids: np.ndarray
    cache_salt: str | None = None


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | EncodedPrompt


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """What a prompt holds, in whatever form it came. At least one of the first two is there."""

    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None


def given_prompt(prompt: Prompt) -> GivenPrompt:
    """What a prompt holds. Ids and text are not checked yet.

    Raises:
        RequestError: it is in no form of `Prompt`.
    """
    if isinstance(prompt, EncodedPrompt):
        return GivenPrompt(prompt.text, prompt.token_ids.tolist(), prompt.cache_salt)
    if isinstance(prompt, str):
        return GivenPrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    if not isinstance(prompt, Sequence | np.ndarray):
        raise RequestError(f"prompt must be {_FORMS}, got {type(prompt).__name__}", "prompt")
    return GivenPrompt(None, _as_list(prompt))


def is_one_prompt(prompts: object) -> bool:
    """Whether this is a single prompt; else it is a list of them."""
    if isinstance(prompts, str | Mapping | EncodedPrompt):
        return True
    if not isinstance(prompts, Sequence):
        return False
    return bool(prompts) and all(isinstance(part, int) for part in prompts)


def _from_mapping(prompt: Mapping[str, Any]) -> GivenPrompt:
    given = {key: value for key, value in prompt.items() if value is not None}
    for key in given:
        if key not in _KEYS:
            raise RequestError(
                f"a prompt with {key!r} is not supported: {did_you_mean(str(key), _KEYS)}", "prompt"
            )
    text, ids, salt = (given.get(key) for key in _KEYS)
    if text is None and ids is None:
        raise RequestError(f"prompt must be {_FORMS}: this dict has neither", "prompt")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"'prompt' of a dict must be a text, got {text!r:.80}", "prompt")
    if isinstance(ids, str) or not (ids is None or isinstance(ids, Sequence | np.ndarray)):
        raise RequestError(f"'prompt_token_ids' must be a list, got {ids!r:.80}", "prompt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError("cache_salt must be a text that is not empty", "cache_salt")
    return GivenPrompt(text, None if ids is None else _as_list(ids), salt)


def _as_list(ids: Sequence[int] | np.ndarray) -> list[int]:
    return ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
