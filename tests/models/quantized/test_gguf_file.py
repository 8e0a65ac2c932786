"""Headers of GGUF files against the gguf package's reader."""

import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.files import resolve_model_path
from outdraft.models.checkpoints.gguf_file import is_gguf, open_gguf
from outdraft.models.decoder.loader import load_model
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import llama, randomised
from tests.models.quantized.gguf_files import SIZES, write_gguf

TEXTS = ["", "a", "çé", "日本", " " * 300, "end"]


def written(path: Path, fill: Callable[[gguf.GGUFWriter], None], **options: Any) -> Path:
    writer = gguf.GGUFWriter(path, "llama", **options)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def fill_all(writer: gguf.GGUFWriter) -> None:
    """Each type of value, and each kind of tensor that the package knows."""
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -100)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -30000)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -5)
    writer.add_float32("a.f32", 0.1)
    writer.add_uint64("a.u64", 1 << 63)
    writer.add_int64("a.i64", -(1 << 60))
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.yes", True)
    writer.add_string("a.text", "çé")
    writer.add_token_list(TEXTS)
    writer.add_token_types([1, 2, 3, 4, 5, 6])
    writer.add_token_scores([0.5, -1.0, 2.5, 0.0, 1e30, -0.1])
    writer.add_array("a.flags", [True, False])
    rng = np.random.default_rng(0)
    for kind, (block, size) in gguf.GGML_QUANT_SIZES.items():
        raw = rng.integers(0, 256, (2, 3, 2 * size), dtype=np.uint8)
        if block == 1:  # the writer takes plain kinds of their own types
            raw = raw if kind.name not in PLAIN else raw.view(PLAIN[kind.name])
        writer.add_tensor(f"of.{kind.name}", raw, raw_dtype=kind)


PLAIN = {"F32": np.float32, "F16": np.float16, "F64": np.float64, "I8": np.int8, "I16": np.int16}
PLAIN |= {"I32": np.int32, "I64": np.int64}


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def assert_as_the_package_reads_it(path: Path) -> None:
    reader, file = gguf.GGUFReader(path), open_gguf(path)
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert {key: plain(value) for key, value in file.values.items()} == theirs
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        ours = file.tensors[tensor.name]
        assert ours.kind == tensor.tensor_type.name
        assert list(ours.shape) == tensor.shape[::-1].tolist()
        assert ours.raw.tobytes() == tensor.data.tobytes()
        assert ours.raw.dtype == np.uint8
        assert len(ours.raw) == np.prod(ours.shape[:-1], dtype=int)
        assert not ours.raw.flags.writeable


def test_every_value_and_every_kind_of_tensor_is_read_as_the_package_does(tmp_path: Path):
    assert_as_the_package_reads_it(written(tmp_path / "a.gguf", fill_all))


def test_tensors_begin_where_the_alignment_of_the_file_says(tmp_path: Path):
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(256)
        fill_all(writer)

    assert_as_the_package_reads_it(written(tmp_path / "a.gguf", fill))


def test_strings_are_a_list_and_numbers_are_read_only(tmp_path: Path):
    values = open_gguf(written(tmp_path / "a.gguf", fill_all)).values
    assert values["tokenizer.ggml.tokens"] == TEXTS
    assert not values["tokenizer.ggml.token_type"].flags.writeable


def test_a_file_is_read_once_until_it_changes(tmp_path: Path):
    path = written(tmp_path / "a.gguf", fill_all)
    first = open_gguf(path)
    assert open_gguf(path) is first
    written(path, lambda writer: writer.add_string("a.text", "other"))
    assert open_gguf(path).values["a.text"] == "other"


def test_a_file_is_known_by_its_first_four_bytes_not_by_its_suffix(tmp_path: Path):
    model = randomised(llama(**SIZES))
    path = write_gguf(model, tmp_path / "model", lambda name: Kind.Q8_0)
    assert resolve_model_path(path) == path
    load_model(path, torch.float32, "cpu", cpu_kernels())
    (tmp_path / "text.gguf").write_text("no model")
    assert not is_gguf(tmp_path / "text.gguf")
    assert not is_gguf(tmp_path)
    with pytest.raises(ConfigError, match=r"is a file: .* a GGUF file, which begins with GGUF"):
        resolve_model_path(tmp_path / "text.gguf")


def cut(content: bytes) -> bytes:
    return content[:-200]


def cut_in_the_strings(content: bytes) -> bytes:
    return content[: content.index("日本".encode()) + 2]


def string_beyond_the_end(content: bytes) -> bytes:
    at = content.index("日本".encode())
    return content[: at - 8] + struct.pack("<Q", 1 << 40) + content[at:]


def no_text(content: bytes) -> bytes:
    return content.replace(b"a.text", b"a.\xff\xfe\xfd\xfc")


def twice(content: bytes) -> bytes:
    return content.replace(b"a.u16", b"a.i16")


def other_version(content: bytes) -> bytes:
    return content[:4] + struct.pack("<I", 1) + content[8:]


def big_endian(content: bytes) -> bytes:
    return content[:4] + struct.pack(">I", 3) + content[8:]


def unknown_kind(content: bytes) -> bytes:
    at = content.index(b"of.F32") + 6 + 4 + 3 * 8
    return content[:at] + struct.pack("<I", 99) + content[at + 4 :]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "damaged or cut short: tensor of.Q1_0 ends after the file"),
        (cut_in_the_strings, "damaged or cut short: .* bytes at .* end after the file"),
        (string_beyond_the_end, "damaged or cut short"),
        (no_text, "damaged or cut short: 'utf-8' codec"),
        (twice, "damaged or cut short: the key a.i16 is there twice"),
        (lambda content: content[:6], "no GGUF file"),
        (lambda content: content[:20], "damaged or cut short: 8 bytes at 16 end after the file"),
        (other_version, "GGUF of version 1 is not supported; supported: 2, 3"),
        (big_endian, "is big-endian"),
        (unknown_kind, "tensor of.F32 of an unknown kind, 99"),
    ],
)
def test_a_damaged_file_is_refused_and_says_why(
    damage: Callable[[bytes], bytes], message: str, tmp_path: Path
):
    path = written(tmp_path / "a.gguf", fill_all)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ConfigError, match=message):
        open_gguf(path)


def split(folder: Path, count: int = 3) -> list[Path]:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_string("a.text", "hello")
        for index in range(2 * count):
            writer.add_tensor(f"t{index}", np.full((2, 3), index, dtype=np.float32))

    written(folder / "model.gguf", fill, split_max_tensors=2)
    return [folder / f"model-{index + 1:05d}-of-{count:05d}.gguf" for index in range(count)]


def test_a_split_model_is_read_as_one(tmp_path: Path):
    parts = split(tmp_path)
    file = open_gguf(parts[0])
    assert (file.path, file.files) == (parts[0], tuple(parts))
    assert file.values["a.text"] == "hello"
    assert list(file.tensors) == [f"t{index}" for index in range(6)]
    for index, tensor in enumerate(file.tensors.values()):
        assert tensor.raw.view(np.float32).tolist() == [[index] * 3] * 2


def test_a_part_that_changes_is_read_again(tmp_path: Path):
    first, second, _ = split(tmp_path)
    before = open_gguf(first)
    assert open_gguf(first) is before
    content = second.read_bytes()
    second.unlink()  # the mapped bytes stay as they are
    second.write_bytes(content.replace(np.float32(3).tobytes(), np.float32(7).tobytes()))
    os.utime(second, ns=(0, 0))
    assert open_gguf(first).tensors["t3"].raw.view(np.float32)[-1, -1] == 7
    assert before.tensors["t3"].raw.view(np.float32)[-1, -1] == 3


def test_parts_that_are_missing_or_misnamed_are_named(tmp_path: Path):
    first, second, third = split(tmp_path)
    with pytest.raises(ConfigError, match=r"is file 2 of 3 .*: give model-00001-of-00003.gguf"):
        open_gguf(second)
    alone = first.rename(tmp_path / "alone.gguf")
    with pytest.raises(ConfigError, match=r"its name must end with -00001-of-00003.gguf"):
        open_gguf(alone)
    alone.rename(first)
    kept = third.read_bytes()
    third.unlink()
    with pytest.raises(ConfigError, match=r"model-00003-of-00003.gguf is missing"):
        open_gguf(first)
    second.rename(third)
    second.write_bytes(kept)
    with pytest.raises(ConfigError, match=r"split.no is 2, but its name says 1"):
        open_gguf(first)
