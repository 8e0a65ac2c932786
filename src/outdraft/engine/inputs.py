"""Turns a caller's prompt and parameters into a request that can run, or a clear error.

A prompt is a text, token ids, or one of vLLM's two dicts. Everything that could make a request fail
later is checked here, before any work starts.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
from tokenizers import Tokenizer

from outdraft.core.errors import ContextLengthError, RequestError, did_you_mean
from outdraft.core.sampling import MAX_INT64, SamplingParams

if TYPE_CHECKING:
    from outdraft.structured.compiler import GrammarCompiler
    from outdraft.structured.matcher import Grammar


_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = "a text, token ids, or a dict with 'prompt' or 'prompt_token_ids'"


class TextPrompt(TypedDict):
    """A text. Prompts with different salts share no blocks of the prefix cache."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """Token ids; `prompt` is the text that they stand for, which the output repeats."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as ids, checked; `text` is None if it came as ids.

    token_ids: int32 [num_tokens].
    """

    text: str | None
    token_ids: np.ndarray
    cache_salt: str | None = None


Prompt = str | Sequence[int] | TextPrompt | TokensPrompt | EncodedPrompt


def _given(prompt: object) -> tuple[str | None, Sequence[int] | None, str | None]:
    """Return text or ids, or both, and the salt of a prompt. Ids and text are not checked yet.

    Raises:
        RequestError: it is in no form of `Prompt`.
    """
    if isinstance(prompt, str):
        prompt = {"prompt": prompt}
    elif isinstance(prompt, Sequence | np.ndarray):
        prompt = {"prompt_token_ids": prompt}
    elif not isinstance(prompt, Mapping):
        raise RequestError(f"prompt must be {_FORMS}, got {type(prompt).__name__}", "prompt")
    given: dict[str, Any] = {key: value for key, value in prompt.items() if value is not None}
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
    return text, ids.tolist() if isinstance(ids, np.ndarray) else ids, salt


def is_one_prompt(prompts: object) -> bool:
    """Return True for a single prompt, False for a list of them."""
    if isinstance(prompts, str | Mapping | EncodedPrompt):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim == 1 and np.issubdtype(prompts.dtype, np.integer)
    if not isinstance(prompts, Sequence):
        return False
    return bool(prompts) and all(isinstance(part, int) for part in prompts)


class InputProcessor:
    """Checks prompts and parameters against the model, and turns text into ids."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        seed: int,
    ) -> None:
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        # Configurations and tokenizers may name tokens that the network does not have.
        self.eos_token_ids = tuple(one for one in eos_token_ids if 0 <= one < vocab_size)
        self._seed = seed

    def encoded(
        self,
        prompt: Prompt,
        *,
        add_special_tokens: bool = True,
        keep_last: int | None = None,
        cache_salt: str | None = None,
    ) -> EncodedPrompt:
        """Encode a prompt; one that is encoded already is returned as it is.

        Args:
            add_special_tokens: to a text; ids are taken as they are.
            keep_last: cut a longer prompt to its last tokens, special ones included.
            cache_salt: for a prompt that brings none.

        Raises:
            ContextLengthError: it is too long.
            RequestError: it is in no form of `Prompt`, empty, or holds ids outside the vocabulary.
        """
        if isinstance(prompt, EncodedPrompt):
            return prompt
        text, ids, salt = _given(prompt)
        if ids is not None:
            ids = ids if keep_last is None else ids[-keep_last:]
            self._check_ids(ids, "prompt")
        else:
            assert text is not None
            ids = self.encode(text, add_special_tokens=add_special_tokens, keep_last=keep_last)
            self._check_text(ids, "prompt")
        if not ids:
            raise RequestError("prompt must hold at least one token", "prompt")
        if len(ids) >= self.max_model_len:
            # Client libraries look for the first sentence, which is OpenAI's.
            raise ContextLengthError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, the "
                f"prompt has {len(ids)} tokens, and 1 must be left for the output: shorten it, or "
                "raise max_model_len",
                "prompt",
            )
        return EncodedPrompt(text, np.array(ids, dtype=np.int32), salt or cache_salt)

    def encode(
        self,
        text: str,
        *,
        add_special_tokens: bool = True,
        keep_last: int | None = None,
        field: str = "prompt",
    ) -> list[int]:
        """Encode a text; special tokens at its start are kept.

        Args:
            keep_last: cut a longer text to its last tokens.
            field: the parameter that it came as, for errors.

        Raises:
            RequestError: there is no tokenizer, or the text is not valid Unicode.
        """
        if self.tokenizer is None:
            raise RequestError(
                "the model came without a tokenizer: give token ids instead of text", field
            )
        added = self.tokenizer.num_special_tokens_to_add(False) if add_special_tokens else 0
        is_cut = keep_last is not None
        try:
            # As a batch: `encode` keeps the interpreter's lock, and with it every other thread.
            [encoding] = self.tokenizer.encode_batch(
                [text], add_special_tokens=add_special_tokens and not is_cut
            )
        except TypeError as error:  # half of a surrogate pair
            raise RequestError(f"{field} is not valid Unicode text", field) from error
        if keep_last is None:
            return encoding.ids
        encoding.truncate(max(0, keep_last - added), direction="left")
        encoding = self.tokenizer.post_process(encoding, add_special_tokens=add_special_tokens)
        return encoding.ids[-keep_last:]

    def check_params(self, params: SamplingParams) -> None:
        """Raise RequestError if a parameter names tokens that do not exist."""
        self._check_ids(params.stop_token_ids or (), "stop_token_ids")
        self._check_ids(params.allowed_token_ids or (), "allowed_token_ids")
        self._check_ids(params.logit_bias or (), "logit_bias")
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > self.vocab_size:
                raise RequestError(f"{name} must be at most {self.vocab_size}", name)
        if self.tokenizer is None:
            for field in ("stop", "bad_words", "structured"):
                if getattr(params, field):
                    raise RequestError(
                        f"{field} needs a tokenizer, and the model came without one", field
                    )

    def stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        ends = () if params.ignore_eos else self.eos_token_ids
        return frozenset([*ends, *(params.stop_token_ids or ())])

    def bad_words_ids(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Encode each bad word as it is written at the start of a text and after a blank."""
        if not params.bad_words:
            return ()
        assert self.tokenizer is not None
        words: list[tuple[int, ...]] = []
        for word in params.bad_words:
            bare = tuple(self.tokenizer.encode(word.lstrip(), add_special_tokens=False).ids)
            spaced = tuple(self.tokenizer.encode(" " + word.lstrip(), add_special_tokens=False).ids)
            if not bare:
                raise RequestError(
                    f"bad_words must not hold empty texts, or blanks alone, got {word!r:.80}",
                    "bad_words",
                )
            words.append(bare)
            if spaced[-len(bare) :] != bare:  # else the bare form bans it too
                words.append(spaced)
        # Words with other ids cannot be sampled.
        return tuple(word for word in words if max(word) < self.vocab_size)

    @cached_property
    def _grammars(self) -> "GrammarCompiler":
        # Imported here: only requests for structured output need its library.
        from outdraft.structured.compiler import GrammarCompiler

        assert self.tokenizer is not None, "check_params has refused it"
        return GrammarCompiler(self.tokenizer, self.vocab_size)

    def grammar(self, params: SamplingParams) -> "Grammar | None":
        """Compile the grammar that the output must follow; None: it follows none. Thread-safe.

        Compiling takes 0.1 s and more, unless the grammar is among the latest.

        Raises:
            RequestError: it cannot be compiled.
        """
        if params.structured is None:
            return None
        return self._grammars.compile(params.structured)

    def prediction_ids(self, params: SamplingParams) -> list[int]:
        """Encode the expected output, at most max_model_len tokens; [] if none is given."""
        if params.prediction is None:
            return []
        if isinstance(params.prediction, str):
            ids = self.encode(params.prediction, add_special_tokens=False, field="prediction")
            self._check_text(ids, "prediction")
        else:
            ids = list(params.prediction)
            self._check_ids(ids, "prediction")
        return ids[: self.max_model_len]

    def seed(self, params: SamplingParams, request_number: int, index: int) -> int:
        """Return the noise key of a request's index-th sequence.

        A seeded request has the same key in any batch; the others differ from each other. Keys are
        not negative.
        """
        parts: tuple[int, ...] = self._seed, request_number, index
        if params.seed is not None:
            if params.seed >= 0 and index == 0:
                return params.seed
            parts = params.seed, index
        digest = blake2b(repr(parts).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") & MAX_INT64

    def _check_text(self, ids: Sequence[int], field: str) -> None:
        """`ids`: a text as the tokenizer encoded it."""
        if not ids or max(ids) < self.vocab_size:
            return
        assert self.tokenizer is not None
        unknown = self.tokenizer.id_to_token(max(ids))
        raise RequestError(
            f"{field} has {unknown!r}, a token that the network does not have", field
        )

    def _check_ids(self, ids: Collection[int], field: str) -> None:
        for token_id in ids:
            if type(token_id) is not int or not 0 <= token_id < self.vocab_size:
                raise RequestError(
                    f"{field} holds {token_id!r}: token ids must be whole numbers from 0 to "
                    f"{self.vocab_size - 1}",
                    field,
                )
