"""What a GGUF file says of its tokens: their kinds, and which of them end an output.

The rules by text are llama.cpp's (src/llama-vocab.cpp): many files mark no more than one end, and
some have their marks as plain text. Needs no torch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any

import numpy as np

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.gguf_file import GgufFile


class TokenKind(IntEnum):
    """Kinds of tokens, as the specification numbers them."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Texts that have a role in files that name no token for it, by the role's key.
_ROLES = {
    "eot": (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>"),
        *("<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]", "<\uff5cend▁of▁sentence\uff5c>"),
        "<end_of_utterance>",
    ),
    "eom": ("<|eom_id|>",),
    "fim_pre": (
        *(
            "<|fim_prefix|>",
            "<fim-prefix>",
            "<fim_prefix>",
            "<\uff5cfim▁begin\uff5c>",
            "<PRE>",
            "▁<PRE>",
        ),
        *("<|code_prefix|>", "<|prefix|>"),
    ),
    "fim_suf": (
        *(
            "<|fim_suffix|>",
            "<fim-suffix>",
            "<fim_suffix>",
            "<\uff5cfim▁hole\uff5c>",
            "<SUF>",
            "▁<SUF>",
        ),
        *("<|code_suffix|>", "<|suffix|>"),
    ),
    "fim_mid": (
        *(
            "<|fim_middle|>",
            "<fim-middle>",
            "<fim_middle>",
            "<\uff5cfim▁end\uff5c>",
            "<MID>",
            "▁<MID>",
        ),
        *("<|code_middle|>", "<|middle|>"),
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_OLDER_KEYS = {"fim_pre": "prefix", "fim_suf": "suffix", "fim_mid": "middle"}
_END_ROLES = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_ENDS = {
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>"),
    *("<\uff5cend▁of▁sentence\uff5c>", "[e~["),
}
# Where all of the first end an output, the second goes on with it, and has another kind.
_EXCEPTIONS = (
    ({"<|return|>", "<|call|>"}, "<|end|>", TokenKind.USER_DEFINED),
    ({"<|return|>", "<|calls|>"}, "<|end|>", TokenKind.USER_DEFINED),
    ({"<|call|>", "<|flush|>"}, "<|end|>", TokenKind.USER_DEFINED),
    ({"<|calls|>", "<|flush|>"}, "<|end|>", TokenKind.USER_DEFINED),
    ({"<|tool_response>"}, "</s>", TokenKind.NORMAL),
)
_SHOWN = {"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"}  # are a part of the text
_WITH_ROLE = _ENDS | _SHOWN | {text for texts in _ROLES.values() for text in texts}


@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """The tokens of a file.

    Attributes:
        kinds_V: a TokenKind each.
        ends: ids that end an output, the one that the file names first.
    """

    tokens: Sequence[str]
    kinds_V: np.ndarray
    ends: tuple[int, ...]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "GgufVocabulary":
        """From a file's metadata; it is empty where there are no tokens."""
        tokens = list[str](values.get("tokenizer.ggml.tokens") or ())
        kinds_V = np.full(len(tokens), TokenKind.NORMAL, dtype=np.int32)
        given = np.asarray(values.get("tokenizer.ggml.token_type", kinds_V), dtype=np.int32)
        if len(given) < len(tokens):
            raise ConfigError(f"GGUF: {len(given)} types for {len(tokens)} tokens")
        kinds_V[:] = given[: len(tokens)]
        ids = {token: number for number, token in enumerate(tokens) if token in _WITH_ROLE}
        roles: dict[str, int] = {}
        for role in ("eos", *_ROLES):
            named = named_token(values, role)
            if named is None and (texts := [one for one in _ROLES.get(role, ()) if one in ids]):
                named = ids[texts[0]]
                kinds_V[named] = TokenKind.CONTROL
            if named is not None:
                roles[role] = named
        ends = [roles[role] for role in _END_ROLES if role in roles]
        by_text = [ids[text] for text in sorted(_ENDS & ids.keys())]
        kinds_V[by_text] = TokenKind.CONTROL
        kinds_V[[ids[text] for text in _SHOWN & ids.keys()]] = TokenKind.USER_DEFINED
        ends = list(dict.fromkeys([*ends, *by_text]))
        texts_of_ends = {tokens[one] for one in ends}
        for together, exempt, kind in _EXCEPTIONS:
            if texts_of_ends >= {*together, exempt} and ids[exempt] in ends:
                ends.remove(ids[exempt])
                kinds_V[ids[exempt]] = kind
        return cls(tokens, kinds_V, tuple(ends))


@lru_cache(maxsize=4)
def end_tokens(file: GgufFile) -> tuple[int, ...]:
    """The ends of a file's vocabulary, looked for once: a start asks often."""
    return GgufVocabulary.of(file.values).ends


def named_token(values: Mapping[str, Any], role: str) -> int | None:
    """The id that a file names for a role, such as eos; None: it names none that exists."""
    keys = [f"tokenizer.ggml.{name}_token_id" for name in (role, _OLDER_KEYS.get(role)) if name]
    num_tokens = len(values.get("tokenizer.ggml.tokens") or [])
    return next(
        (int(values[key]) for key in keys if key in values and 0 <= values[key] < num_tokens), None
    )
