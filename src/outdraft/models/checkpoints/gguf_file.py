"""The header of a GGUF file: its metadata, and where its tensors are. Needs numpy only.

The format is that of ggml-org/ggml, docs/gguf.md. A model that is split over several files is read
as one, as llama.cpp does it.
"""

import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from outdraft.core.errors import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = 32  # where the file does not say
# Types of metadata values by their numbers: strings, arrays, and numbers.
_STRING, _ARRAY = 8, 9
_NUMBERS = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "|b1",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
# Kinds of tensors by their numbers in ggml.h: name, numbers of a block, bytes of a block. Those
# that can be read without the gguf package, which knows the others.
_KINDS = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
_MAX_DIMS = 4
_SPLIT_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf")
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True, eq=False)
class GgufTensor:
    """One tensor, not read yet.

    Attributes:
        kind: as ggml names it, such as "Q4_K".
        shape: outputs first, which is ggml's order reversed.
        raw: uint8 [rows, bytes of a row], a read-only view of the mapped file; a row is what has
            one index in all dimensions but the last.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    raw: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class GgufFile:
    """A GGUF file, or all files of a model that is split.

    Attributes:
        path: of the first file.
        files: all of them.
        values: metadata by their keys: numbers, strings, lists of strings, and read-only arrays of
            numpy.
        tensors: by their names, in the order of the files.
        maps: of the files.
    """

    path: Path
    files: tuple[Path, ...]
    values: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    maps: tuple[mmap.mmap, ...]

    def release(self) -> None:
        """Give back the memory of pages that were read; they can be read again."""
        for one in self.maps:
            one.madvise(mmap.MADV_DONTNEED)


def is_gguf(path: Path) -> bool:
    """Is true if the path names a GGUF file, by its first 4 bytes; directories are none."""
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def open_gguf(path: Path) -> GgufFile:
    """The file, mapped into memory; read once, for all who ask, until it changes.

    Raises:
        ConfigError: it is damaged, of another version or byte order, or no first part of a split
            model, or another part is missing.
    """
    try:
        present = (file.stat() for file in _parts(path) if file == path or file.is_file())
        return _opened(path, tuple((status.st_size, status.st_mtime_ns) for status in present))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def _parts(path: Path) -> list[Path]:
    """The files of a model whose first one this is, by their names."""
    match = _SPLIT_NAME.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count = match[1], int(match[3])
    return [path.with_name(f"{stem}-{at:05d}-of-{count:05d}.gguf") for at in range(1, count + 1)]


@lru_cache(maxsize=4)
def _opened(path: Path, states: tuple[tuple[int, int], ...]) -> GgufFile:
    """Open the file once for each of its states: the sizes and times of the model's files."""
    first = _read_file(path)
    count, number = (int(first.values.get(f"split.{key}", 0)) for key in ("count", "no"))
    if count < 2:
        return first
    match = _SPLIT_NAME.fullmatch(path.name)
    if number != 0:
        name = f"{match[1]}-00001-of-{count:05d}.gguf" if match else "the first one"
        raise ConfigError(f"{path} is file {number + 1} of {count} of a split model: give {name}")
    if match is None or (int(match[2]), int(match[3])) != (1, count):
        raise ConfigError(
            f"{path} is file 1 of {count} of a split model: its name must end with "
            f"-00001-of-{count:05d}.gguf, so that the others can be found"
        )
    files, tensors, maps = [path], dict(first.tensors), [*first.maps]
    for index, file in enumerate(_parts(path)[1:], start=1):
        if not file.is_file():
            raise ConfigError(f"{path} is file 1 of {count} of a split model: {file} is missing")
        part = _read_file(file)
        if (number := part.values.get("split.no")) != index:
            raise ConfigError(f"{file}: split.no is {number}, but its name says {index}")
        if twice := tensors.keys() & part.tensors.keys():
            raise ConfigError(f"{file} has tensors of another file, too: {sorted(twice)[0]}")
        files.append(file)
        tensors |= part.tensors
        maps += part.maps
    wanted = first.values.get("split.tensors.count", len(tensors))
    if wanted != len(tensors):
        raise ConfigError(
            f"{path}: split.tensors.count is {wanted}, but its files have {len(tensors)} tensors"
        )
    return GgufFile(path, tuple(files), first.values, tensors, tuple(maps))


def _read_file(path: Path) -> GgufFile:
    """One file, as if it were all."""
    with path.open("rb") as file:
        head = file.read(8)
        version = int.from_bytes(head[4:], "little")
        if head[:4] != _MAGIC or len(head) < 8:
            raise ConfigError(f"{path} is no GGUF file: it does not begin with {_MAGIC.decode()}")
        if version & 0xFFFF == 0:
            raise ConfigError(f"{path} is big-endian: convert it by gguf-convert-endian")
        if version not in _VERSIONS:
            raise ConfigError(
                f"{path}: GGUF of version {version} is not supported; supported: 2, 3"
            )
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    try:
        return _read_header(path, mapped)
    except KeyError as error:
        raise ConfigError(f"{path} is damaged: it has metadata of type {error}") from error
    except (ValueError, struct.error) as error:
        raise ConfigError(f"{path} is no GGUF file, damaged or cut short: {error}") from error


def _read_header(path: Path, mapped: mmap.mmap) -> GgufFile:
    header = _Header(memoryview(mapped))
    num_tensors, num_values = header.number("<u8"), header.number("<u8")
    values: dict[str, Any] = {}
    for _ in range(num_values):
        key = header.string()
        if key in values:
            raise ValueError(f"the key {key} is there twice")
        values[key] = header.value(header.number("<u4"))
    places = [header.tensor() for _ in range(num_tensors)]
    alignment = int(values.get("general.alignment", _ALIGNMENT))
    if alignment < 1:
        raise ValueError(f"general.alignment is {alignment}")
    first = -(-header.at // alignment) * alignment
    content = np.frombuffer(header.content, np.uint8)
    tensors: dict[str, GgufTensor] = {}
    for name, shape, kind, offset in places:
        if name in tensors:
            raise ValueError(f"the tensor {name} is there twice")
        tensors[name] = _tensor(name, shape, kind, content[first + offset :])
    return GgufFile(path, (path,), values, tensors, (mapped,))


def _tensor(name: str, shape: tuple[int, ...], number: int, content: np.ndarray) -> GgufTensor:
    """`content`: of the file, from its first byte on."""
    kind, block, block_bytes = _KINDS.get(number) or _kind_of_package(name, number)
    *outer, inner = shape or (1,)
    if inner % block:
        raise ValueError(f"tensor {name} of {kind} has rows of {inner} numbers")
    rows, row_bytes = prod(outer), inner // block * block_bytes
    if rows * row_bytes > len(content):
        raise ValueError(f"tensor {name} ends after the file")
    return GgufTensor(name, kind, shape, content[: rows * row_bytes].reshape(rows, row_bytes))


def _kind_of_package(name: str, number: int) -> tuple[str, int, int]:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise ConfigError(
            f"GGUF tensors of kind {number}, such as {name}, are read by the gguf package: "
            "pip install 'outdraft[gguf]'"
        ) from None
    if number not in set(GGMLQuantizationType):
        raise ConfigError(f"the GGUF file has tensor {name} of an unknown kind, {number}")
    kind = GGMLQuantizationType(number)
    return kind.name, *GGML_QUANT_SIZES[kind]


class _Header:
    """Reads one thing after the other.

    Attributes:
        content: the whole file.
        at: where the next thing begins.
    """

    def __init__(self, content: memoryview) -> None:
        self.content, self.at = content, 8

    def number(self, kind: str) -> Any:
        """A number of this numpy type."""
        return self._numbers(kind, 1)[0].item()

    def string(self) -> str:
        (size,) = _LENGTH.unpack(self._taken(_LENGTH.size))
        return str(self._taken(size), "utf-8")

    def value(self, kind: int) -> Any:
        """A metadata value of this type."""
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_NUMBERS[kind])
        kind, count = self.number("<u4"), self.number("<u8")
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        numbers = self._numbers(_NUMBERS[kind], count).copy()  # at an address that fits them
        numbers.flags.writeable = False
        return numbers

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape, kind and place of a tensor."""
        name, num_dims = self.string(), self.number("<u4")
        if num_dims > _MAX_DIMS:
            raise ValueError(f"tensor {name} has {num_dims} dimensions")
        shape = tuple(int(size) for size in self._numbers("<u8", num_dims)[::-1])
        return name, shape, self.number("<u4"), self.number("<u8")

    def _numbers(self, kind: str, count: int) -> np.ndarray:
        dtype = np.dtype(kind)
        return np.frombuffer(self._taken(count * dtype.itemsize), dtype)

    def _taken(self, size: int) -> memoryview:
        first, end = self.at, self.at + size
        if end > len(self.content):
            raise ValueError(f"{size} bytes at {first} end after the file")
        self.at = end
        return self.content[first:end]
