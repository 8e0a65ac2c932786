"""Quantised checkpoints that the transformers library computes, against its plain ones."""

import copy
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outdraft.core.errors import ConfigError
from outdraft.core.weights import QUANTIZATIONS, WeightFormat
from outdraft.distributed.group import Ranks
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.ops import Kernels
from outdraft.models.base import LanguageModel
from outdraft.models.choose import load_language_model
from outdraft.models.library.experts import PackedExperts
from outdraft.models.modules import linears_of
from tests.models.checkpoints import chunked_logits
from tests.models.families import randomised_family
from tests.models.quantized.families import EXPERTS, finish, save_family, save_gpt_oss
from tests.models.quantized.test_formats import tokens
from tests.models.quantized.writers import Format, Written, awq, compressed, fp8, gptq
from tests.ranks import on_ranks
from tests.rounding import SHORTS_ROUNDING, model_bound

CPU = torch.device("cpu")
STRAIGHT: dict[str, Format] = {
    "awq": awq(group=32),
    "gptq": gptq(group=32),
    "gptq-biases": gptq(group=32, bias=True),
    "w4a16": compressed("pack-quantized", group=32),
    "w8a16": compressed("pack-quantized", bits=8),
}
DEQUANTISED: dict[str, Format] = {
    "gptq-desc-act": gptq(group=32, desc_act=True),
    "float8": compressed("float-quantized", bits=8, kind="float"),
    "float8-tensor": compressed("float-quantized", bits=8, kind="float", strategy="tensor"),
    "fp8-block": fp8((32, 32)),
    "fp8-tensor": fp8(None),
}
FORMATS = STRAIGHT | DEQUANTISED
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
    kernels = kernels or choose_kernels("auto", CPU, torch.float32, activation_dtype="float")
    return load_language_model(
        path, torch.float32, CPU, kernels, implementation="transformers", **options
    )


def assert_same_logits(model: LanguageModel, theirs: torch.nn.Module) -> None:
    token_ids_T = tokens(23) % 61
    with torch.no_grad():
        wanted = theirs(token_ids_T[None]).logits[0]
    with torch.inference_mode():
        got = chunked_logits(model, token_ids_T, [15, 1, 7])
    formats = [one.format for one in linears_of(model)]
    formats += [one.experts.format for one in experts_of(model)]
    tolerance = model_bound(formats) * max(1.0, wanted.abs().max().item())
    torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)


@pytest.mark.parametrize(("family", "stored_as", "changes"), PUBLISHED)
def test_logits_are_those_of_the_numbers_that_the_tensors_stand_for(
    family: str,
    stored_as: str,
    changes: dict[str, Any],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rounds = stored_as in DEQUANTISED
    theirs = save_family(family, tmp_path, FORMATS[stored_as], rounds=rounds, **changes)
    with caplog.at_level(logging.INFO, logger="outdraft"):
        assert_same_logits(loaded(tmp_path), theirs)
    lines = [line for line in caplog.messages if "weights (" in line]
    what = "are dequantised" if rounds else "are kept as they are"
    assert lines
    assert all(what in line for line in lines)


def test_gpt_oss_is_read_as_it_is_published(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = save_gpt_oss(tmp_path)
    with caplog.at_level(logging.INFO, logger="outdraft"):
        assert_same_logits(loaded(tmp_path), theirs)
    assert (
        "24 weights (MXFP4, 4-bit floats, a scale for 32 inputs) are kept as they are"
        in caplog.text
    )


def test_experts_and_products_keep_the_formats_of_their_codes(tmp_path: Path) -> None:
    """GPT-OSS has quantised experts only; its other products are as published."""
    save_gpt_oss(tmp_path / "oss")
    save_family("qwen-3-moe", tmp_path / "moe", STRAIGHT["gptq"], rounds=False, **EXPERTS)
    oss, moe = loaded(tmp_path / "oss"), loaded(tmp_path / "moe")
    assert {one.experts.format for one in experts_of(oss)} == {WeightFormat.INT8_G32}
    assert {one.experts.format for one in experts_of(moe)} == {WeightFormat.INT4_G32}
    assert moe.routed is not None
    assert moe.routed.nbytes == sum(one.packed_bytes for one in experts_of(moe))
    assert {one.format for one in linears_of(oss)} == {WeightFormat.BFLOAT16}
    assert {one.format for one in linears_of(moe)} == {WeightFormat.INT4_G32, WeightFormat.FLOAT32}


def experts_of(model: LanguageModel) -> list[PackedExperts]:
    assert isinstance(model, torch.nn.Module)
    return [part for part in model.modules() if isinstance(part, PackedExperts)]


def test_products_of_several_formats_stay_apart_and_keep_their_codes(tmp_path: Path) -> None:
    """v has other codes than q and k, and up is plain beside a gate of codes."""
    four, eight = STRAIGHT["w4a16"], compressed("pack-quantized", bits=8, group=32)
    config = copy.deepcopy(four.config)
    eights = eight.config["config_groups"]["group_0"] | {"targets": ["re:.*v_proj"]}
    config["config_groups"]["group_1"] = eights
    config["ignore"] += ["re:.*up_proj"]

    def write(weight_ED: torch.Tensor) -> Written:
        is_value = weight_ED.shape == (16, 64)  # with one head of keys and values
        return (eight if is_value else four).write(weight_ED)

    stored_as = Format(write, config, ("lm_head", "re:.*up_proj"))
    sizes = {"num_key_value_heads": 1, "attention_bias": False}
    theirs = save_family("gemma-3", tmp_path, stored_as, rounds=False, **sizes)
    config["config_groups"]["group_1"]["targets"] = ["re:.*[kv]_proj"]
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    model = loaded(tmp_path)
    assert_same_logits(model, theirs)
    assert isinstance(model, torch.nn.Module)
    kept = [one.format for one in linears_of(model)]
    assert kept.count(WeightFormat.INT8_G32) == 6  # k and v of each layer
    assert kept.count(WeightFormat.INT4_G32) == 12


def test_a_fused_float8_stack_of_experts_is_dequantised(tmp_path: Path) -> None:
    """As Llama 4 is published: a scale for each output of each expert."""
    model = randomised_family("llama-4", hidden_size=64, intermediate_size=128)
    model.bfloat16().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = {key: one.float() for key, one in tensors.items()}
    for key in [key for key in tensors if "experts." in key]:
        scale = plain[key].abs().amax(1, keepdim=True) / 448
        tensors[key] = (plain[key] / scale).to(torch.float8_e4m3fn)
        tensors[f"{key}_scale"] = scale
        plain[key] = (tensors[key].float() * scale).bfloat16().float()
    theirs = finish(model, tmp_path, tensors, plain, {"quant_method": "fbgemm_fp8"})
    assert_same_logits(loaded(tmp_path), theirs)


def test_what_kept_codes_forbid_is_refused(tmp_path: Path) -> None:
    save_family("phi-3", tmp_path, STRAIGHT["gptq"], rounds=False)
    with pytest.raises(ConfigError, match=r"quantization int8: .* quantised already .GPTQ, 4 bits"):
        loaded(tmp_path, quantization=WeightFormat.INT8)
    with pytest.raises(ConfigError, match=r"'dummy' makes plain weights, but those of .* .gptq."):
        loaded(tmp_path, has_random_weights=True)


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        ("mlp.experts.down_proj_scales", "lacks the tensor 'model.layers.1.mlp.experts.down_proj_"),
        ("mlp.experts.down_proj_blocks", "dtype U8, and its quantization_config does not say"),
        ("self_attn.q_proj.weight", "missing keys: model.layers.1.self_attn.q_proj.weight"),
    ],
)
def test_a_missing_tensor_is_named(lost: str, message: str, tmp_path: Path) -> None:
    save_gpt_oss(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.1.{lost}"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        loaded(tmp_path)


CUT = "a rank's part begins in the middle of a group"
# Families, formats, what config.json calls otherwise; the part of the codes that a rank has, and
# why other weights are numbers.
OVER_RANKS: list[tuple[str, Format, dict[str, Any], float, str]] = [
    ("qwen-3-moe", gptq(group=32), EXPERTS, 0.5, ""),
    ("gemma-3", awq(group=32), {}, 0.5, ""),
    ("gemma-3", compressed("pack-quantized", bits=8), {}, 0.5, ""),
    ("gemma-3", gptq(group=64), {"intermediate_size": 192}, 0.5, CUT),
    ("gemma-3", fp8((32, 32)), {}, 0.0, "there are no tiles of 8-bit floats"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("family", "stored_as", "changes", "share", "reason"), OVER_RANKS)
def test_each_rank_keeps_its_part_of_the_codes(
    family: str,
    stored_as: Format,
    changes: dict[str, Any],
    share: float,
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    theirs = save_family(family, tmp_path, stored_as, rounds=not share, **changes)
    ids_T = tokens(23) % 61
    with torch.no_grad():
        wanted_TV = theirs(ids_T[None]).logits[0]
    whole = coded_bytes(loaded(tmp_path))
    caplog.set_level(logging.INFO, logger="outdraft")
    caplog.clear()

    def part(ranks: Ranks) -> tuple[torch.Tensor, int]:
        model = loaded(tmp_path, group=ranks.target)
        return chunked_logits(model, ids_T, [23]), coded_bytes(model)

    (first_TS, first), (second_TS, second) = on_ranks(2, 1, part)
    got_TV = torch.cat([first_TS, second_TS], dim=1)[:, :61]
    rounding = 2**-6 if reason == CUT else SHORTS_ROUNDING
    assert (got_TV - wanted_TV).abs().max() <= rounding * wanted_TV.abs().max()
    # Less than its share: a whole weight of 192 inputs is padded to 256, its half of 96 to none.
    # More: the few outputs of keys and values are padded to a tile.
    assert 0.9 * share * whole <= first <= 1.12 * share * whole
    assert (second < first) == (reason == CUT)
    told = [line for line in caplog.messages if "are dequantised" in line]
    assert len(told) == {CUT: 1, "": 0}.get(reason, 2)
    assert all(reason in line for line in told)


def test_experts_whose_parts_would_begin_within_a_group_are_whole_codes_on_each_rank(
    tmp_path: Path,
) -> None:
    changes = {"moe_intermediate_size": 96}
    theirs = save_family("qwen-3-moe", tmp_path, gptq(group=32), rounds=False, **changes)
    ids_T = tokens(23) % 61
    with torch.no_grad():
        wanted_TV = theirs(ids_T[None]).logits[0]
    whole = coded_bytes(loaded(tmp_path), of_experts=True)

    def part(ranks: Ranks) -> tuple[torch.Tensor, int]:
        model = loaded(tmp_path, group=ranks.target)
        return chunked_logits(model, ids_T, [23]), coded_bytes(model, of_experts=True)

    (first_TS, first), (second_TS, second) = on_ranks(2, 1, part)
    got_TV = torch.cat([first_TS, second_TS], dim=1)[:, :61]
    assert (got_TV - wanted_TV).abs().max() <= SHORTS_ROUNDING * wanted_TV.abs().max()
    assert first == second == whole > 0


def coded_bytes(model: LanguageModel, *, of_experts: bool = False) -> int:
    """What products take whose weights are codes, those of blocks and experts among them."""
    assert isinstance(model, torch.nn.Module)
    blocks = experts_of(model)
    found = [(one.experts.format, one.packed_bytes) for one in blocks]
    if not of_experts:
        found += [(one.format, one.packed_bytes) for one in linears_of(model)]
    return sum(size for kept, size in found if kept in QUANTIZATIONS)
