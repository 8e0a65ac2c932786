"""What may cross between processes, and one way to write it as bytes."""

from dataclasses import fields, is_dataclass
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
import numpy as np

Message = TypeVar("Message")


def check_plain(value: object, where: str = "") -> None:
    """Numbers, texts, arrays of numbers, sequences and mappings of such things, and frozen
    structs and dataclasses."""
    where = f"{where}.{type(value).__name__}"
    if value is None or type(value) in (bool, int, float, str) or isinstance(value, StrEnum):
        return
    if isinstance(value, np.ndarray):
        assert value.dtype.kind in "bif", where
    elif isinstance(value, tuple | list):
        for part in value:
            check_plain(part, where)
    elif isinstance(value, dict):
        check_plain([*value, *value.values()], where)
    else:
        if isinstance(value, msgspec.Struct):
            is_frozen, names = value.__struct_config__.frozen, value.__struct_fields__
        else:
            assert is_dataclass(value), where
            assert not isinstance(value, type), where
            is_frozen = value.__dataclass_params__.frozen
            names = tuple(one.name for one in fields(value))
        assert is_frozen, where
        for name in names:
            check_plain(getattr(value, name), f"{where}.{name}")


def as_bytes(message: object) -> bytes:
    """The message without types: whoever reads it knows what comes."""
    return msgspec.msgpack.encode(message, enc_hook=_encoded)


def from_bytes(kind: type[Message], data: bytes) -> Message:
    """A message with nothing of the one that was written."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_decoded)


def _encoded(value: Any) -> object:
    if not isinstance(value, np.ndarray):
        raise NotImplementedError(f"{type(value)} is no plain data")
    return value.dtype.str, value.shape, value.tobytes()


def _decoded(kind: type, value: Any) -> np.ndarray:
    assert kind is np.ndarray
    dtype, shape, data = value
    return np.frombuffer(data, dtype).reshape(shape).copy()
