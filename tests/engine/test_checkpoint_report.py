"""What is said of a checkpoint before it is loaded, against the loaded model."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from outdraft.config.engine import EngineConfig
from outdraft.loading.report import report
from outdraft.models.choose import load_language_model
from outdraft.models.decoder.loader import load_model
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import llama, randomised, save
from tests.models.families import randomised_family
from tests.models.quantized.families import EXPERTS, save_family
from tests.models.quantized.gguf_files import SIZES as GGUF_SIZES
from tests.models.quantized.gguf_files import write_gguf
from tests.models.quantized.writers import (
    SIZES,
    Format,
    compressed,
    fp8,
    gptq,
    save_quantized,
    small_llama,
)

CASES: dict[str, tuple[Format, str]] = {
    "gptq": (gptq(), "2 x int4, codes and scales as stored (GPTQ, 4 bits"),
    "compressed": (
        compressed("pack-quantized", group=32, symmetric=False),
        "2 x int4-g32-zero, codes",
    ),
    "fp8": (fp8((128, 128)), "2 x bfloat16, dequantised: there are no tiles of 8-bit floats"),
}


LOST = {"gptq": "nothing", "compressed": "nothing", "fp8": "14 weights"}


@pytest.mark.parametrize("name", CASES)
def test_the_report_counts_the_bytes_that_the_loaded_model_has(name: str, tmp_path: Path):
    stored_as, row = CASES[name]
    save_quantized(small_llama(), tmp_path, stored_as, rounds=False)
    rows = report(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu"))
    model = load_model(tmp_path, torch.float32, "cpu", cpu_kernels())

    assert rows["architecture"] == "LlamaForCausalLM"
    assert rows["down_proj"].startswith(row)
    assert rows["not kept as stored"] == LOST[name]
    linear = sum(layer.down_proj.packed_bytes for layer in model.decoder.layers)
    assert rows["down_proj"].endswith(f": {linear / 2**20:.2f} MiB")
    norms = sum(p.nbytes for p in model.parameters() if p.dim() == 1)
    assert rows["all weights"].startswith(f"{(model.memory_bytes - norms) / 2**20:.2f} MiB")


def test_a_plain_checkpoint_is_reported_as_it_will_be_packed(tmp_path: Path):
    save(randomised(llama(**SIZES)).bfloat16(), tmp_path)
    rows = report(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu"))
    assert rows["quantisation"] == "none"
    assert rows["gate_up_proj"] == "4 x bfloat16: 0.25 MiB"
    assert rows["not kept as stored"] == "nothing"


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_file_of_blocks_is_kept_as_it_is_stored(is_tied: bool, tmp_path: Path):
    theirs = randomised(llama(**GGUF_SIZES, tie_word_embeddings=is_tied))
    kinds = {"attn_v": Kind.Q6_K, "token_embd": Kind.Q5_0}
    path = write_gguf(
        theirs,
        tmp_path / "model.gguf",
        lambda name: next((kinds[one] for one in kinds if one in name), Kind.Q4_K),
    )
    rows = report(EngineConfig(model=str(path), dtype="float32", device="cpu"))
    model = load_model(path, torch.float32, "cpu", cpu_kernels())

    assert rows["not kept as stored"] == "nothing"
    assert rows["qkv_proj"].startswith("4 x q4_k, codes and scales as stored (GGUF, Q4_K)")
    assert ("embedding" in rows) != is_tied
    norms = sum(p.nbytes for p in model.parameters() if p.dim() == 1)
    assert rows["all weights"].startswith(f"{(model.memory_bytes - norms) / 2**20:.2f} MiB")


LIBRARYS: dict[str, tuple[str, Format | None, tuple[str, ...]]] = {
    "gptq": ("qwen-3-moe", gptq(group=32), ("gate_up_proj", "3 x int4-g32, codes and scales")),
    "fp8": (
        "qwen-3-moe",
        fp8((32, 32)),
        ("gate_up_proj", "3 x bfloat16, dequantised (FP8, 8-bit floats"),
    ),
    "plain": ("phi-3", None, ("qkv_proj", "3 x float32: ")),
    "pictures": ("gemma-3-vl", None, ("o_proj", "3 x float32: ")),
    "pictures and windows": ("mistral-3-vl", None, ("o_proj", "3 x float32: ")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIBRARYS)
def test_the_report_counts_what_the_transformers_library_computes(name: str, tmp_path: Path):
    family, stored_as, (product, row) = LIBRARYS[name]
    if stored_as is None:
        save(randomised_family(family), tmp_path)
    else:
        save_family(family, tmp_path, stored_as, rounds=True, **EXPERTS)
    rows = report(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu"))
    model = load_language_model(tmp_path, torch.float32, torch.device("cpu"), cpu_kernels())

    assert rows[product].startswith(row)
    assert isinstance(model, torch.nn.Module)
    vectors = sum(one.nbytes for one in model.parameters() if one.dim() == 1)
    mib = (model.memory_bytes - vectors) / 2**20
    # Products of few outputs are padded to a tile.
    assert float(rows["all weights"].split()[0]) == pytest.approx(mib, abs=0.016)
