"""Reads tokenizers; needs no torch, so that a process without an engine can."""

from pathlib import Path

from tokenizers import Tokenizer

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.gguf_file import is_gguf, open_gguf
from outdraft.text.gguf_tokenizer import tokenizer_of_gguf


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
