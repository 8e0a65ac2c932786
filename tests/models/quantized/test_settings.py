"""What config.json may say of quantised weights, what it may not, and where they go."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from outdraft.core.errors import ConfigError
from outdraft.core.weights import WeightFormat
from outdraft.distributed.group import Ranks
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.torch.table import reference_kernels
from outdraft.models.checkpoints.quantization import read_quantization
from outdraft.models.decoder.loader import load_model
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import chunked_logits, qwen2, qwen3, randomised
from tests.models.quantized.test_formats import assert_same_logits, tokens
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
from tests.ranks import on_ranks

CPU = torch.device("cpu")
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}


def groups(**changes: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": GROUP},
    } | changes


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "'bitsandbytes' is not supported; supported: compressed",
        ),
        ({"bits": 4}, "quant_method None is not supported"),
        ("gptq", "must be an object"),
        (groups(config_groups={}), "config_groups is missing"),
        (groups(config_groups={"W4A16": ["Linear"]}), "config_groups must be an object of objects"),
        (groups(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized' with int weights"),
        (groups(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config is not"),
        (groups(transform_config={"config_groups": {"R1": {}}}), "transform_config is not"),
        (groups(ignore="lm_head"), "ignore must be a list of names"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be a positive"),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 128, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin' is not supported",
        ),
        (
            {
                "quant_method": "gptq",
                "bits": 4,
                "group_size": 128,
                "dynamic": {"+:lm_head": {}},
            },
            "settings of single modules",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not supported"),
        ({"quant_method": "awq", "bits": 4, "format": "gemv"}, "version 'gemv' is not supported"),
        (
            {"quant_method": "awq", "bits": 4, "dynamic": {"+:lm_head": {}}},
            "settings of single modules. is not supported for AWQ",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not supported"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            "weight_block_size must be two pos",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name(config: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        read_quantization({"quantization_config": config})


def test_modules_that_gptq_leaves_plain_are_known_by_their_tensors():
    values = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"-:.*gate": {}}}
    assert read_quantization({"quantization_config": values}) is not None


def test_names_say_more_than_patterns_and_those_more_than_classes():
    schemes = {
        "all": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}},
        "down": {"targets": ["re:.*down_proj"], "weights": {"num_bits": 4, "group_size": 32}},
        "one": {
            "targets": ["model.layers.1.mlp.down_proj"],
            "weights": {"num_bits": 8, "strategy": "channel"},
        },
    }
    found = read_quantization(
        {"quantization_config": groups(config_groups=schemes, ignore=["lm_head", "re:.*k_proj"])}
    )
    assert found is not None

    def of(module: str) -> tuple[int, int | None] | None:
        scheme = found.scheme_of(module)
        return None if scheme is None else (scheme.bits, scheme.group_inputs)

    assert of("model.layers.0.mlp.up_proj") == (4, 128)
    assert of("model.layers.0.mlp.down_proj") == (4, 32)
    assert of("model.layers.1.mlp.down_proj") == (8, None)
    assert of("lm_head") is None
    assert of("model.layers.0.self_attn.k_proj") is None
    assert of("model.embed_tokens") is None


def test_ignored_modules_stay_plain_and_a_fused_product_follows_its_least(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    stored_as = compressed("pack-quantized", group=32, ignore=("lm_head", "re:.*v_proj"))
    stored_as.ignored = ("lm_head", *(f"model.layers.{i}.self_attn.v_proj" for i in (0, 1)))
    theirs = save_quantized(small_llama(), tmp_path, stored_as, rounds=False)
    for name, weight in theirs.state_dict().items():
        if "q_proj" in name or "k_proj" in name:
            weight.copy_(weight.bfloat16())  # as they are beside a plain one
    with caplog.at_level(logging.INFO, logger="outdraft"):
        model = load_model(tmp_path, torch.float32, "cpu", cpu_kernels())

    (layer, _) = model.decoder.layers
    assert layer.qkv_proj.format is WeightFormat.BFLOAT16
    assert layer.o_proj.format is WeightFormat.INT4_G32
    assert any("a part of the same product is not quantised" in m for m in caplog.messages)
    assert_same_logits(model, theirs)


@pytest.mark.parametrize("family", [qwen2, qwen3])
def test_biases_and_norms_beside_quantised_weights_are_read(family: Any, tmp_path: Path):
    theirs = save_quantized(randomised(family(**SIZES)), tmp_path, gptq(group=32), rounds=False)
    model = load_model(tmp_path, torch.float32, "cpu", cpu_kernels())
    assert_same_logits(model, theirs)


def test_a_quantised_head_is_kept_as_it_is(tmp_path: Path):
    stored_as = compressed("pack-quantized", group=32, ignore=())
    stored_as.ignored = ()
    theirs = save_quantized(small_llama(), tmp_path, stored_as, rounds=False)
    model = load_model(tmp_path, torch.float32, "cpu", cpu_kernels())
    assert model.lm_head.format is WeightFormat.INT4_G32
    assert_same_logits(model, theirs)


def test_activations_and_a_cache_that_are_not_quantised_here_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    activations = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    stored_as = compressed(
        "float-quantized", bits=8, kind="float", strategy="tensor", activations=activations
    )
    stored_as.config["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    theirs = save_quantized(small_llama(), tmp_path, stored_as, rounds=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for layer in range(2):
        for name in ("k_proj.input_scale", "k_scale", "v_scale", "kv_scale"):
            tensors[f"model.layers.{layer}.self_attn.{name}"] = torch.tensor(0.5)
    save_file(tensors, tmp_path / "model.safetensors")
    with caplog.at_level(logging.INFO, logger="outdraft"):
        model = load_model(tmp_path, torch.float32, "cpu", cpu_kernels())

    assert "the checkpoint was made for 8-bit float activations: only its weights" in caplog.text
    assert "keys and values stay as wide" in caplog.text
    assert_same_logits(model, theirs)


def test_quantization_beside_kept_codes_is_refused_and_of_dequantised_numbers_done(
    tmp_path: Path,
):
    save_quantized(small_llama(), tmp_path / "awq", awq(), rounds=False)
    save_quantized(small_llama(), tmp_path / "fp8", fp8((128, 128)), rounds=True)
    options = torch.float32, "cpu", cpu_kernels(), None, WeightFormat.INT8
    with pytest.raises(ConfigError, match=r"quantization int8: .* quantised already .AWQ, 4 bits"):
        load_model(tmp_path / "awq", *options)
    model = load_model(tmp_path / "fp8", *options)
    assert model.decoder.layers[0].down_proj.format is WeightFormat.INT8
    with pytest.raises(ConfigError, match=r"'dummy' makes plain weights, but those of .* .awq."):
        load_model(tmp_path / "awq", *options[:3], has_random_weights=True)


BROKEN: dict[str, tuple[Format, str, str]] = {
    "no scales": (gptq(), "model.layers.0.mlp.up_proj.scales", "lacks the tensor '.*scales'"),
    "no zero points": (awq(), "model.layers.1.mlp.up_proj.qzeros", "lacks the tensor '.*qzeros'"),
    "no codes": (gptq(), "model.layers.0.mlp.up_proj.qweight", "lacks tensors: .*up_proj.weight"),
    "no block scales": (
        fp8((128, 128)),
        "model.layers.0.mlp.up_proj.weight_scale_inv",
        "lacks the tensor",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_missing_tensor_is_named(name: str, tmp_path: Path):
    stored_as, lost, message = BROKEN[name]
    save_quantized(small_llama(), tmp_path, stored_as, rounds=False)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        load_model(tmp_path, torch.float32, "cpu", reference_kernels())


def test_groups_that_config_json_counts_otherwise_are_refused(tmp_path: Path):
    save_quantized(small_llama(), tmp_path, gptq(group=32), rounds=False)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["group_size"] = 64
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"scales have shape \[128, 8\], but .* of 64 inputs needs"
    ):
        load_model(tmp_path, torch.float32, "cpu", reference_kernels())


@pytest.mark.parametrize(
    ("stored_as", "down_format"),
    [
        (awq(group=32), WeightFormat.INT4_G32_ZERO),
        (compressed("int-quantized", bits=8), WeightFormat.INT8),
        (gptq(), WeightFormat.PLAIN),  # the second rank's part begins within a group
    ],
    ids=["awq-g32", "int8", "gptq-g128"],
)
def test_each_rank_keeps_its_part_of_the_codes(
    stored_as: Format, down_format: WeightFormat, tmp_path: Path
):
    save_quantized(small_llama(), tmp_path, stored_as, rounds=False)
    kernels = choose_kernels("reference", CPU, torch.float64)

    def load(ranks: Ranks) -> Any:
        return load_model(tmp_path, torch.float64, CPU, kernels, None, None, ranks.target)

    wanted_TV = chunked_logits(load(Ranks()), tokens(), [23])

    def logits(ranks: Ranks) -> tuple[torch.Tensor, list[WeightFormat]]:
        model = load(ranks)
        formats = [layer.down_proj.format for layer in model.decoder.layers]
        return chunked_logits(model, tokens(), [23]), formats

    found = on_ranks(4, 1, logits)

    assert down_format in found[1][1]
    got_TV = torch.cat([part for part, _ in found], dim=1)[:, : SIZES["vocab_size"]]
    assert (got_TV - wanted_TV).abs().max() <= 1e-9
