"""Reads tokenizers; needs no torch, so that a process without an engine can.

The tokenizer of a GGUF file gives the ids that llama.cpp gives. There are 2 kinds of vocabularies:
byte-level BPE with its merges, and SentencePiece's BPE, in which the pair whose joined token has
the highest score is merged first.

Before byte-level BPE a text is split by a rule that the file names. The names, and the expressions
that llama.cpp takes for them, are those of its llama-vocab.cpp. One expression cuts a text into its
matches and the text between them; the next one cuts those pieces.
"""

# ruff: noqa: RUF001  # letters of many scripts look alike

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.gguf_file import is_gguf, open_gguf
from outdraft.models.checkpoints.gguf_metadata import TokenKind, named_token, vocabulary_of

_BLANK = "▁"  # stands for " " in SentencePiece's tokens
# Names of models whose special tokens take the blanks that follow them, and the tokens that do not;
# the format has no field for it.
_BLANK_TAKERS, _NO_BLANK_TAKERS = ("phi-3", "phi3"), ("<unk>", "<s>", "<|endoftext|>")
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # of files that do not name them
_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
_QWEN_2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}"
# Words that begin with large letters and go on with small ones; only in ASCII do the two differ.
_LARGE, _SMALL = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*"
_SIGNS_OR_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_CJK = r"(?:(?!\s)[一-龥ࠀ-一가-퟿])+"
# Letters of scripts with two cases; those that Unicode writes in two ways are escaped.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯ"
    "ꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


_NOT_PUNCTUATED = r" ?[^(\s|.,!?…。，、।۔،)]+"

_LLAMA_3_NAMES = "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"
# Expressions in Oniguruma's syntax, applied one after the other, by the names of their rule.
_RULES = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]"),
    _LLAMA_3_NAMES: (_LLAMA_3,),
    "dbrx smaug-bpe glm4 chatglm-bpe": (_LLAMA_3,),
    "deepseek-llm": (
        r"[\r\n]",
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
        r"\s+$",
        _CJK,
        r"\p{N}+",
    ),
    "deepseek-coder": (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}"),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
        rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
    ),
    "falcon": (r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]"),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": (r"\p{N}", _GPT_2),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling": (_GPT_2,),
    "stablelm2 qwen2 deepseek-r1-qwen kormo megrez hunyuan grok-2 solar-open f2llmv2": (_QWEN_2,),
    "qwen35": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
        rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
    ),
    "tekken": ("|".join([*_CASED, r"\p{N}", _SIGNS_OR_PATHS, _BLANKS]),),
    "gpt-4o llama4 kanana2 minimax-m2 talkie": (
        "|".join(rf"{cased}{_CONTRACTIONS}?" for cased in _CASED)
        + rf"|\p{{N}}{{1,3}}|{_SIGNS_OR_PATHS}|{_BLANKS}",
    ),
    "bailingmoe bailingmoe2 llada-moe": (
        rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "seed-coder": (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",),
    "minicpm5": (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_SIGNS}|{_BLANKS}"),
    "exaone-moe": (
        rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
    ),
    "jais-2": (
        rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
        + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
        + r"|\s{1,2}(?!\S)|\s{1}",
    ),
    "ufakzeka": (rf"{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}",),
    "laguna": (r"[^\n]+|[\n]+", _QWEN_2),
    "viking": (_NOT_PUNCTUATED, r"\p{N}"),
    "poro-chat bloom gpt3-finnish": (_NOT_PUNCTUATED,),
    "chameleon": (
        "<sentinel:[0-9]+>",
        "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
        r"([\t\n]|    |  )",
        r"\p{N}",
        r"[\p{P}!-/:-@\[-`{-~]",
        _GPT_2,
    ),
}
SPLITS = {name: rule for names, rule in _RULES.items() for name in names.split()}
# Texts begin with the BOS token, unless the file says else.
ADD_BOS = {*_LLAMA_3_NAMES.split(), "tekken", "chameleon"}
# A piece that is a token is taken before any merge.
TAKE_WHOLE_WORDS = {*_LLAMA_3_NAMES.split(), "tekken", "minicpm5"}


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The checkpoint's fast tokenizer, None if it has none.

    One in SentencePiece's own form, tokenizer.model, is converted by transformers.

    Raises:
        ConfigError: it cannot be read, or not be converted.
    """
    file = path / "tokenizer.json"
    if is_gguf(path):
        tokenizer = _of_gguf(path)
    elif file.exists():
        try:
            tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library has no narrower one
            raise ConfigError(f"{file} is not a readable tokenizer: {error}") from error
    elif (path / "tokenizer.model").exists():
        tokenizer = _converted(path)
    else:
        return None
    # Some were saved while they prepared training batches. A prompt is never cut or filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _of_gguf(path: Path) -> Tokenizer:
    try:
        return tokenizer_of_gguf(open_gguf(path).values)
    except ConfigError as error:
        raise ConfigError(
            f"no tokenizer can be made of the vocabulary of {path}: give the directory of the "
            f"model's tokenizer by --tokenizer ({error})"
        ) from error


def _converted(path: Path) -> Tokenizer:
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(f"{_how_to_convert(path)} (transformers is not installed)") from error
    try:
        slow = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        return Tokenizer.from_str(slow.backend_tokenizer.to_str())
    except Exception as error:  # the libraries have no narrower one
        raise ConfigError(f"{_how_to_convert(path)} (it fails: {error!s:.300})") from error


def _how_to_convert(path: Path) -> str:
    return (
        f"{path} has a tokenizer.model but no tokenizer.json; to convert it: pip install "
        'transformers sentencepiece protobuf && python -c "from transformers import '
        f"AutoTokenizer; AutoTokenizer.from_pretrained('{path}').save_pretrained('{path}')\""
    )


def tokenizer_of_gguf(values: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer; `values`: the metadata of the file by its keys.

    Raises:
        ConfigError: the file has no vocabulary, or one of a kind that is not supported; or it does
            not name a supported rule to split texts.
    """
    kind = values.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ConfigError(f"tokenizer.ggml.model must be gpt2 or llama, got {kind!r}")
    tokens, kinds_V, _ = vocabulary_of(values)
    ids = _ids(tokens, kinds_V)
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(values, ids)
    else:
        tokenizer, adds_bos = _sentencepiece(values, ids), True
    _add_special(tokenizer, values, tokens, kinds_V)
    _add_ends(tokenizer, values, tokens, adds_bos)
    return tokenizer


def _ids(tokens: Sequence[str], kinds_V: np.ndarray) -> dict[str, int]:
    """Ids by tokens. Those that fill up the end of a table, and that no text has, are left out."""
    is_used_V = kinds_V != TokenKind.UNUSED
    num_tokens = int(np.flatnonzero(is_used_V)[-1]) + 1 if is_used_V.any() else 0
    tokens = tokens[:num_tokens]
    ids = dict(zip(tokens, range(num_tokens), strict=True))
    if len(ids) < num_tokens:
        [(twice, _)] = Counter(tokens).most_common(1)
        raise ConfigError(f"tokenizer.ggml.tokens holds {twice!r} twice")
    if not ids:
        raise ConfigError("tokenizer.ggml.tokens is missing or empty")
    return ids


def _byte_level(values: Mapping[str, Any], ids: dict[str, int]) -> tuple[Tokenizer, bool]:
    """Make the tokenizer; True: its texts begin with BOS, unless the file says else."""
    name = values.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ConfigError(f"tokenizer.ggml.pre must be one of {', '.join(SPLITS)}; got {name!r}")
    if "tokenizer.ggml.merges" not in values:
        raise ConfigError("tokenizer.ggml.merges is missing")
    pairs = (merge.partition(" ") for merge in values["tokenizer.ggml.merges"])
    merges = [(first, second) for first, _, second in pairs]
    try:
        model = BPE(ids, merges, ignore_merges=name in TAKE_WHOLE_WORDS)
    except Exception as error:  # the library has no narrower one
        raise ConfigError(f"tokenizer.ggml.merges: {error}") from error
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(one), "isolated") for one in SPLITS[name]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            *_without_bytes(ids),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, name in ADD_BOS


def _without_bytes(ids: Mapping[str, int]) -> list[pre_tokenizers.Split]:
    """Remove the bytes that no token stands for; the texts on both sides are not merged."""
    missing = "".join(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - ids.keys()))
    return [pre_tokenizers.Split(Regex(f"[{re.escape(missing)}]"), "removed")] if missing else []


def _sentencepiece(values: Mapping[str, Any], ids: dict[str, int]) -> Tokenizer:
    scores = values.get("tokenizer.ggml.scores")
    if scores is None or len(scores) < len(ids):
        raise ConfigError("tokenizer.ggml.scores: a score for each token is needed")
    model = BPE(
        ids, _merges(ids, np.asarray(scores, dtype=np.float32)), byte_fallback=True, fuse_unk=True
    )
    unknown = named_token(values, "unknown")
    unknown = _SENTENCEPIECE_IDS["unknown"] if unknown is None else unknown
    model.unk_token = values["tokenizer.ggml.tokens"][unknown]
    tokenizer = Tokenizer(model)
    begins_with_blank = bool(values.get("tokenizer.ggml.add_space_prefix", True))
    blanks = normalizers.Replace(" ", _BLANK)
    prefix = [normalizers.Prepend(_BLANK)] if begins_with_blank else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, blanks])
    strip = [decoders.Strip(" ", 1, 0)] if begins_with_blank else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def _merges(ids: Mapping[str, int], scores_V: np.ndarray) -> list[tuple[str, str]]:
    """All pairs of tokens that are a token together, that of the highest score first."""
    tokens = list(ids)
    best_first = np.argsort(-scores_V[: len(tokens)], kind="stable").tolist()
    return [
        (first, second)
        for token in map(tokens.__getitem__, best_first)
        for end in range(1, len(token))
        if (first := token[:end]) in ids and (second := token[end:]) in ids
    ]


def _add_special(
    tokenizer: Tokenizer, values: Mapping[str, Any], tokens: Sequence[str], kinds_V: np.ndarray
) -> None:
    """Add the tokens that are found in a text before it is split."""
    found = np.isin(kinds_V, [TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED])
    name = str(values.get("general.name", "")).lower()
    takes_blanks = any(one in name for one in _BLANK_TAKERS)
    tokenizer.add_tokens(
        [
            AddedToken(
                tokens[number],
                special=kinds_V[number] != TokenKind.USER_DEFINED,
                normalized=False,
                rstrip=takes_blanks and tokens[number] not in _NO_BLANK_TAKERS,
            )
            for number in np.flatnonzero(found).tolist()
        ]
    )


def _add_ends(
    tokenizer: Tokenizer, values: Mapping[str, Any], tokens: Sequence[str], adds_bos: bool
) -> None:
    """Add the tokens that a text begins and ends with."""
    form: list[str] = ["$A"]
    used: list[tuple[str, int]] = []
    is_sentencepiece = values["tokenizer.ggml.model"] == "llama"
    for role, default in (("bos", adds_bos), ("eos", False)):
        if not values.get(f"tokenizer.ggml.add_{role}_token", default):
            continue
        number = named_token(values, role)
        if number is None and is_sentencepiece:
            number = _SENTENCEPIECE_IDS[role]
        if number is None:
            raise ConfigError(
                f"tokenizer.ggml.add_{role}_token needs tokenizer.ggml.{role}_token_id"
            )
        form.insert(0 if role == "bos" else len(form), tokens[number])
        used.append((tokens[number], number))
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=form, special_tokens=used)
