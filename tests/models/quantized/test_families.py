"""Quantised checkpoints that the transformers library computes, against its plain ones."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.ops import Kernels
from outdraft.models.base import LanguageModel
from outdraft.models.choose import load_language_model
from tests.models.checkpoints import chunked_logits
from tests.models.quantized.families import EXPERTS, save_family, save_gpt_oss
from tests.models.quantized.test_formats import tokens
from tests.models.quantized.writers import Format, awq, compressed, fp8, gptq

CPU = torch.device("cpu")
FORMATS: dict[str, Format] = {
    "awq": awq(group=32),
    "gptq": gptq(group=32),
    "gptq-biases": gptq(group=32, bias=True),
    "gptq-desc-act": gptq(group=32, desc_act=True),
    "w4a16": compressed("pack-quantized", group=32),
    "w8a16": compressed("pack-quantized", bits=8),
    "float8": compressed("float-quantized", bits=8, kind="float"),
    "float8-tensor": compressed("float-quantized", bits=8, kind="float", strategy="tensor"),
    "fp8-block": fp8((32, 32)),
    "fp8-tensor": fp8(None),
}
# Families and formats that are published, and what config.json calls otherwise.
PUBLISHED: list[tuple[str, str, dict[str, Any]]] = [
    *(("qwen-3-moe", name, EXPERTS) for name in FORMATS),
    ("mixtral", "gptq", {}),
    ("mixtral", "awq", {}),
    ("mixtral", "gptq-biases", {}),
    ("mixtral", "float8-tensor", {}),
    ("deepseek-v3", "fp8-block", EXPERTS | {"q_lora_rank": 32, "kv_lora_rank": 32}),
    ("gemma-3", "w4a16", {}),
    ("gemma-3", "gptq", {}),
    ("phi-3", "gptq", {}),
    ("phi-3", "w8a16", {}),
    ("llama-4", "w4a16", {"intermediate_size_mlp": 64}),
    ("glm-4", "awq", {}),
]


def loaded(path: Path, kernels: Kernels | None = None, **options: Any) -> LanguageModel:
    kernels = kernels or choose_kernels("auto", CPU, torch.float32)
    return load_language_model(
        path, torch.float32, CPU, kernels, implementation="transformers", **options
    )


def assert_same_logits(model: LanguageModel, theirs: torch.nn.Module) -> None:
    token_ids_T = tokens(23) % 61
    with torch.no_grad():
        wanted = theirs(token_ids_T[None]).logits[0]
    with torch.inference_mode():
        got = chunked_logits(model, token_ids_T, [15, 1, 7])
    tolerance = 2e-3 * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("family", "stored_as", "changes"), PUBLISHED)
def test_logits_are_those_of_the_numbers_that_the_tensors_stand_for(
    family: str, stored_as: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    theirs = save_family(family, tmp_path, FORMATS[stored_as], rounds=True, **changes)
    assert_same_logits(loaded(tmp_path), theirs)


def test_gpt_oss_is_read_as_it_is_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = save_gpt_oss(tmp_path)
    with caplog.at_level(logging.INFO, logger="outdraft"):
        assert_same_logits(loaded(tmp_path), theirs)
    assert "24 weights (MXFP4, 4-bit floats, a scale for 32 inputs) are dequantised" in caplog.text
