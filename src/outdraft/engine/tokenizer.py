"""Reads tokenizers; needs no torch, so that a process without an engine can."""

from pathlib import Path

from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import BPE

from outdraft.core.errors import ConfigError
from outdraft.models.quantized.gguf_file import is_gguf, open_gguf

_AS_GPT_2 = (None, "default", "gpt-2")
# How texts are split where a whole word that is a token is taken before any merge, and where a text
# begins with the token of beginnings unless the file says else.
_WHOLE_WORDS_FIRST = {
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
    "tekken",
}


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The checkpoint's fast tokenizer, None if it has none.

    One in SentencePiece's own form, tokenizer.model, is converted by transformers, and so is the
    vocabulary of a GGUF file.

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
    wanted = "give the directory of the model's tokenizer by --tokenizer"
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise ConfigError(
            f"the vocabulary of {path} needs transformers: pip install transformers, or {wanted}"
        ) from error
    try:
        slow = AutoTokenizer.from_pretrained(
            path.parent, gguf_file=path.name, local_files_only=True, trust_remote_code=False
        )
        tokenizer = Tokenizer.from_str(slow.backend_tokenizer.to_str())
        _complete(tokenizer, path)
        return tokenizer
    except Exception as error:  # the libraries have no narrower one
        raise ConfigError(
            f"no tokenizer can be made of the vocabulary of {path}: {wanted} ({error!s:.300})"
        ) from error


def _complete(tokenizer: Tokenizer, path: Path) -> None:
    """What llama.cpp knows of byte-level vocabularies by the name of how they split a text, and
    transformers does not read (src/llama-vocab.cpp).

    Raises:
        ConfigError: transformers does not know the name and takes another way to split.
    """
    values = open_gguf(path).values
    splits = values.get("tokenizer.ggml.pre")
    if values.get("tokenizer.ggml.model") != "gpt2" or not isinstance(tokenizer.model, BPE):
        return
    if splits == "smollm":
        each_digit = pre_tokenizers.Digits(individual_digits=True)
        by_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([each_digit, by_words])
    if isinstance(tokenizer.pre_tokenizer, pre_tokenizers.ByteLevel) and splits not in _AS_GPT_2:
        raise ConfigError(f"transformers does not split texts as {splits!r} says")
    if splits not in _WHOLE_WORDS_FIRST:
        return
    tokenizer.model.ignore_merges = True
    begin = values.get("tokenizer.ggml.bos_token_id")
    if begin is not None and values.get("tokenizer.ggml.add_bos_token") is None:
        token = values["tokenizer.ggml.tokens"][begin]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=[token, "$A"], special_tokens=[(token, begin)]
        )


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
