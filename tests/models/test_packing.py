"""Models whose weights are packed by what their numbers need."""

from pathlib import Path

import pytest
import torch

from outdraft.core.weights import QUANTIZATIONS, WeightFormat
from outdraft.kernels.torch.table import reference_kernels
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.loader import load_model
from outdraft.models.modules import Linear
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import (
    VARIANTS,
    are_bfloat16,
    chunked_logits,
    llama,
    random_tokens,
    randomised,
    save,
)
from tests.rounding import MODEL_ROUNDING, SHORTS_ROUNDING


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-biases"])
def test_a_bfloat16_checkpoint_runs_in_float32_from_its_own_bytes(name: str, tmp_path: Path):
    path = save(randomised(VARIANTS[name]()).bfloat16(), tmp_path)
    model = load_model(path, torch.float32, "cpu", cpu_kernels())
    plain = load_model(path, torch.float32, "cpu", reference_kernels())
    token_ids_T = random_tokens(23)

    assert are_bfloat16(model)
    torch.testing.assert_close(
        chunked_logits(model, token_ids_T, [15, 1, 7]),
        chunked_logits(plain, token_ids_T, [15, 1, 7]),
        rtol=MODEL_ROUNDING,
        atol=MODEL_ROUNDING,
    )


def test_weight_bytes_are_those_that_are_stored_and_read(tmp_path: Path):
    config = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 128}
    path = save(randomised(llama(**config)).bfloat16(), tmp_path)
    model = load_model(path, torch.float32, "cpu", cpu_kernels())
    plain = CausalLM(model.config, reference_kernels())

    products = sum(p.numel() for p in plain.parameters() if p.dim() == 2) - 128 * 64
    others = sum(p.numel() for p in plain.parameters() if p.dim() == 1)
    assert model.weight_bytes == 2 * products + 4 * others
    assert model.memory_bytes == model.weight_bytes + 4 * 128 * 64


def test_a_matrix_with_a_number_that_does_not_fit_stays_float32(tmp_path: Path):
    theirs = randomised(VARIANTS["llama"]()).bfloat16().float()
    with torch.no_grad():
        theirs.model.layers[1].mlp.up_proj.weight[3, 4] = 1 + 2.0**-12
    path = save(theirs, tmp_path)

    model = load_model(path, torch.float32, "cpu", cpu_kernels())

    kept = {
        name: module.format for name, module in model.named_modules() if isinstance(module, Linear)
    }
    assert kept.pop("decoder.layers.1.gate_up_proj") is WeightFormat.FLOAT32
    assert set(kept.values()) == {WeightFormat.BFLOAT16}
    assert model.numbers == "float32 over bfloat16 weights"


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_a_quantized_model_has_the_logits_of_its_rounded_weights_and_says_so(
    quantization: WeightFormat, tmp_path: Path
):
    path = save(randomised(VARIANTS["llama"]()).bfloat16(), tmp_path)
    kernels = cpu_kernels()
    model = load_model(path, torch.float32, "cpu", kernels, quantization=quantization)
    rounded = load_model(path, torch.float32, "cpu", reference_kernels(), quantization=quantization)
    token_ids_T = random_tokens(23)

    assert model.numbers == f"float32 over {quantization} weights"
    assert rounded.numbers == model.numbers
    torch.testing.assert_close(
        chunked_logits(model, token_ids_T, [15, 1, 7]),
        chunked_logits(rounded, token_ids_T, [15, 1, 7]),
        rtol=SHORTS_ROUNDING,
        atol=SHORTS_ROUNDING,
    )
