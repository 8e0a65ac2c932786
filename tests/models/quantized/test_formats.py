"""Quantised checkpoints against transformers over the numbers that they stand for."""

import logging
from pathlib import Path

import pytest
import torch

from outdraft.core.weights import WeightFormat
from outdraft.kernels.torch.table import reference_kernels
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.loader import load_model
from outdraft.models.modules import linears_of
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import chunked_logits
from tests.models.quantized.writers import (
    SIZES,
    Format,
    awq,
    compressed,
    fp8,
    gptq,
    save_quantized,
    small_llama,
)
from tests.rounding import model_bound

INT8_ACTIVATIONS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
# What the products of the layers with the most inputs are kept as.
STRAIGHT: dict[str, tuple[Format, WeightFormat]] = {
    "w4a16-g128": (compressed("pack-quantized", group=128), WeightFormat.INT4),
    "w4a16-g32": (compressed("pack-quantized", group=32), WeightFormat.INT4_G32),
    "w4a16-g64": (compressed("pack-quantized", group=64), WeightFormat.INT4_G32),
    "w4a16-channel": (compressed("pack-quantized"), WeightFormat.INT4),
    "w4a16-g128-asym": (
        compressed("pack-quantized", group=128, symmetric=False),
        WeightFormat.INT4_ZERO,
    ),
    "w4a16-g32-asym": (
        compressed("pack-quantized", group=32, symmetric=False),
        WeightFormat.INT4_G32_ZERO,
    ),
    "w4a16-g32-asym-zeros-not-packed": (
        compressed("pack-quantized", group=32, symmetric=False, packs_zeros=False),
        WeightFormat.INT4_G32_ZERO,
    ),
    "w8a16-packed": (compressed("pack-quantized", bits=8), WeightFormat.INT8),
    "w8a16-g128": (compressed("pack-quantized", bits=8, group=128), WeightFormat.INT8_G128),
    "w8a8": (
        compressed("int-quantized", bits=8, activations=INT8_ACTIVATIONS),
        WeightFormat.INT8,
    ),
    "w8a16-tensor": (compressed("naive-quantized", bits=8, strategy="tensor"), WeightFormat.INT8),
    "gptq": (gptq(), WeightFormat.INT4),
    "gptq-asym": (gptq(symmetric=False), WeightFormat.INT4_ZERO),
    "gptq-v2": (gptq(symmetric=False, version="gptq_v2"), WeightFormat.INT4_ZERO),
    "gptq-v2-by-format": (
        gptq(symmetric=False, version="gptq_v2", says="format"),
        WeightFormat.INT4_ZERO,
    ),
    "gptq-zeros-of-0": (gptq(symmetric=False, has_lowest_zeros=True), WeightFormat.INT4_ZERO),
    "gptq-order-of-zeros": (gptq(group=32, writes_order=False), WeightFormat.INT4_G32),
    "gptq-g32": (gptq(group=32), WeightFormat.INT4_G32),
    "gptq-8": (gptq(bits=8), WeightFormat.INT8_G128),
    "gptq-zero-biases": (gptq(bias=True), WeightFormat.INT4),
    "awq": (awq(), WeightFormat.INT4_ZERO),
    "awq-g32": (awq(group=32), WeightFormat.INT4_G32_ZERO),
}
# What is dequantised, and a word of the reason.
DEQUANTISED: dict[str, tuple[Format, str]] = {
    "gptq-desc-act": (gptq(desc_act=True, group=32), "order of their own"),
    "gptq-desc-act-asym": (gptq(desc_act=True, symmetric=False, group=32), "order of their own"),
    "w4a16-g16": (compressed("pack-quantized", group=16), "groups of 32 and 128 inputs, not of 16"),
    "w8a16-asym": (compressed("int-quantized", bits=8, symmetric=False), "no zero points"),
    "float8-channel": (compressed("float-quantized", bits=8, kind="float"), "8-bit floats"),
    "float8-tensor": (
        compressed("float-quantized", bits=8, kind="float", strategy="tensor"),
        "8-bit floats",
    ),
    "float8-block": (
        compressed("float-quantized", bits=8, kind="float", strategy="block", block=[64, 32]),
        "8-bit floats",
    ),
    "fp8-block": (fp8((128, 128)), "8-bit floats"),
    "fp8-cut-block": (fp8((96, 96)), "8-bit floats"),
    "fp8-tensor": (fp8(None), "8-bit floats"),
}


def tokens(num_tokens: int = 23) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, SIZES["vocab_size"], (num_tokens,), generator=generator)


def assert_same_logits(model: CausalLM, theirs: torch.nn.Module) -> None:
    token_ids_T = tokens()
    with torch.no_grad():
        wanted = theirs(token_ids_T[None]).logits[0]
    tolerance = model_bound(linear.format for linear in linears_of(model))
    got = chunked_logits(model, token_ids_T, [15, 1, 7])
    torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance)


def formats_of(model: CausalLM) -> set[WeightFormat]:
    """The formats of the products of the layers."""
    return {linear.format for linear in linears_of(model.decoder)}


@pytest.mark.parametrize("name", STRAIGHT)
def test_codes_and_scales_are_kept_as_they_are(name: str, tmp_path: Path):
    stored_as, tile = STRAIGHT[name]
    theirs = save_quantized(small_llama(), tmp_path, stored_as, rounds=False)
    for kernels in (cpu_kernels(), reference_kernels()):
        model = load_model(tmp_path, torch.float32, "cpu", kernels)

        for layer in model.decoder.layers:  # of the others one group may be all inputs
            assert layer.down_proj.format is tile
        assert_same_logits(model, theirs)


@pytest.mark.parametrize("name", DEQUANTISED)
def test_what_fits_no_tile_is_dequantised_to_bfloat16_and_the_log_says_why(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    stored_as, reason = DEQUANTISED[name]
    theirs = save_quantized(small_llama(), tmp_path, stored_as, rounds=True)
    with caplog.at_level(logging.INFO, logger="outdraft"):
        model = load_model(tmp_path, torch.float32, "cpu", cpu_kernels())

    assert formats_of(model) == {WeightFormat.BFLOAT16}
    assert_same_logits(model, theirs)
    (line,) = [one for one in caplog.messages if "dequantised" in one]
    assert line.startswith("14 weights")
    assert reason in line
