"""llama.cpp's own vocabulary of a GGUF file: the oracle of tokenizers.

The library is the one in the wheel of xllamacpp, called by its C interface (llama.h): only that
loads a vocabulary without its weights.
"""

import ctypes
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int32, c_void_p
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, c_char_p, c_void_p)


class _ModelParams(ctypes.Structure):
    """llama_model_params of the pinned version; what follows is not set here."""

    _fields_ = [
        ("devices", c_void_p),
        ("tensor_buft_overrides", c_void_p),
        ("n_gpu_layers", c_int32),
        ("split_mode", c_int32),
        ("load_mode", c_int32),
        ("lazy_mode", c_int32),
        ("main_gpu", c_int32),
        ("tensor_split", POINTER(c_float)),
        ("progress_callback", c_void_p),
        ("progress_callback_user_data", c_void_p),
        ("kv_overrides", c_void_p),
        ("vocab_only", c_bool),
        ("others", ctypes.c_ubyte * 63),
    ]


class LlamaVocabulary:
    """What llama.cpp makes of texts and ids with the vocabulary of a file.

    Raises:
        ValueError: it refuses the file.
    """

    def __init__(self, path: Path) -> None:
        self._library = _library()
        params = self._library.llama_model_default_params()
        params.vocab_only = True
        self._model = self._library.llama_model_load_from_file(str(path).encode(), params)
        if not self._model:
            raise ValueError(f"llama.cpp does not read {path}")
        self._vocabulary = self._library.llama_model_get_vocab(self._model)

    def __del__(self) -> None:
        if self._model:
            self._library.llama_model_free(self._model)

    def encode(self, text: str, *, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        ids = (c_int32 * (len(data) + 8))()
        count = self._library.llama_tokenize(
            self._vocabulary, data, len(data), ids, len(ids), add_special, parse_special
        )
        assert count >= 0
        return ids[:count]

    def decode(self, ids: list[int], *, show_special: bool) -> str:
        """Bytes that are no characters are replaced."""
        return b"".join(self.piece(one, show_special=show_special) for one in ids).decode(
            errors="replace"
        )

    def piece(self, token_id: int, *, show_special: bool) -> bytes:
        """What the token adds to a text."""
        buffer = ctypes.create_string_buffer(1024)
        size = self._library.llama_token_to_piece(
            self._vocabulary, token_id, buffer, len(buffer), 0, show_special
        )
        assert size >= 0
        return buffer.raw[:size]

    def ends(self) -> set[int]:
        """All tokens at which it ends an output."""
        count = self._library.llama_vocab_n_tokens(self._vocabulary)
        is_end = self._library.llama_vocab_is_eog
        return {one for one in range(count) if is_end(self._vocabulary, one)}


@cache
def _library() -> Any:
    spec = find_spec("xllamacpp")
    assert spec is not None
    assert spec.origin is not None
    library = ctypes.CDLL(str(next(Path(spec.origin).parent.glob("xllamacpp*.so"))))
    library.llama_model_default_params.restype = _ModelParams
    library.llama_model_load_from_file.restype = c_void_p
    library.llama_model_load_from_file.argtypes = [c_char_p, _ModelParams]
    library.llama_model_get_vocab.restype = c_void_p
    library.llama_model_get_vocab.argtypes = [c_void_p]
    library.llama_model_free.argtypes = [c_void_p]
    text = [c_void_p, c_char_p, c_int32, c_void_p, c_int32, c_bool, c_bool]
    library.llama_tokenize.argtypes = text
    library.llama_token_to_piece.argtypes = [c_void_p, c_int32, c_char_p, c_int32, c_int32, c_bool]
    library.llama_vocab_n_tokens.argtypes = [c_void_p]
    library.llama_vocab_is_eog.argtypes = [c_void_p, c_int32]
    library.llama_vocab_is_eog.restype = c_bool
    library.llama_log_set.argtypes = [_LOG, c_void_p]
    library.silent = _LOG(lambda level, message, data: None)  # kept: the library calls it
    library.llama_log_set(library.silent, None)
    return library
