"""The oracle's own file of float32."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf.quants import dequantize

from tests.models.checkpoints import llama, randomised
from tests.models.quantized.gguf_files import SIZES, byte_level, write_gguf
from tests.published.llama_cpp import write_float32


def test_a_file_of_float32_has_the_same_tensors_and_metadata(tmp_path: Path):
    _, vocabulary = byte_level(("a tale of two cities",))
    sizes = SIZES | {"vocab_size": len(vocabulary["tokens"])}
    stored = tmp_path / "stored.gguf"
    write_gguf(randomised(llama(**sizes)), stored, lambda name: Kind.Q8_0, vocabulary)

    readers = GGUFReader(stored), GGUFReader(write_float32(stored, tmp_path / "float32.gguf"))

    assert [*readers[0].fields] == [*readers[1].fields]
    for one, other in zip(readers[0].tensors, readers[1].tensors, strict=True):
        assert (one.name, [*one.shape]) == (other.name, [*other.shape])
        np.testing.assert_array_equal(dequantize(one.data, one.tensor_type), other.data)
