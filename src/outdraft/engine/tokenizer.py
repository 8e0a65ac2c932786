"""Reads tokenizers; needs no torch, so that a process without an engine can."""

from pathlib import Path

from tokenizers import Tokenizer

from outdraft.core.errors import ConfigError


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The checkpoint's fast tokenizer, None if it has none."""
    file = path / "tokenizer.json"
    if not file.exists():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library has no narrower one
        raise ConfigError(f"{file} is not a readable tokenizer: {error}") from error
    # Some were saved while they prepared training batches. A prompt is never cut or filled up.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
