"""What is read from config.json, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from outdraft.core.errors import ConfigError
from outdraft.models.decoder.config import ModelConfig, RopeKind
from tests.models.checkpoints import LLAMA3

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-05,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "tie_word_embeddings": True,
}
QWEN2 = LLAMA | {
    "architectures": ["Qwen2ForCausalLM"],
    "use_sliding_window": False,
    "sliding_window": 131072,
    "max_window_layers": 3,
}


def test_the_spellings_of_transformers_4_and_5_mean_the_same():
    scaling = {key: value for key, value in LLAMA3.items() if key != "rope_theta"}
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    new = LLAMA | {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "dtype": "bfloat16"}

    config = ModelConfig.from_mapping(old)

    assert config == ModelConfig.from_mapping(new)
    assert config.rope.kind is RopeKind.LLAMA3
    assert (config.rope.theta, config.rope.factor, config.rope.original_max_len) == (5e5, 8.0, 32)
    assert config.torch_dtype == "bfloat16"


def test_the_oldest_spelling_of_the_rope_type_is_read():
    config = ModelConfig.from_mapping(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}})

    assert (config.rope.kind, config.rope.factor) == (RopeKind.LINEAR, 2.0)


def test_yarn_makes_the_context_longer():
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

    config = ModelConfig.from_mapping(
        QWEN2 | {"max_position_embeddings": 32768, "rope_scaling": yarn}
    )

    assert config.max_model_len == 131072


def test_the_generation_config_names_the_tokens_that_end_a_text():
    assert ModelConfig.from_mapping(LLAMA).eos_token_ids == (128001, 128008, 128009)
    assert ModelConfig.from_mapping(LLAMA, {"eos_token_id": [7, 5, 7]}).eos_token_ids == (7, 5)
    assert ModelConfig.from_mapping(LLAMA, {"eos_token_id": 0}).eos_token_ids == (0,)
    assert ModelConfig.from_mapping(LLAMA | {"eos_token_id": None}).eos_token_ids == ()


def test_a_bos_token_may_be_zero_or_missing():
    assert ModelConfig.from_mapping(LLAMA | {"bos_token_id": 0}).bos_token_id == 0
    assert ModelConfig.from_mapping(LLAMA | {"bos_token_id": None}).bos_token_id is None


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({}, (None,) * 4),
        ({"use_sliding_window": True}, (None, None, None, 131072)),
        ({"use_sliding_window": True, "sliding_window": None}, (None,) * 4),
        (
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
    ],
)
def test_qwen_windows_are_per_layer(changes, windows):
    assert ModelConfig.from_mapping(QWEN2 | changes).windows == windows


def test_only_mistral_has_a_window_for_all_layers():
    mistral = LLAMA | {"architectures": ["MistralForCausalLM"], "sliding_window": 4096}

    assert ModelConfig.from_mapping(mistral).windows == (4096,) * 4
    assert ModelConfig.from_mapping(mistral | {"sliding_window": None}).windows == (None,) * 4
    assert ModelConfig.from_mapping(LLAMA | {"sliding_window": 4096}).windows == (None,) * 4


def test_families_differ_in_biases_and_norms():
    def traits(architecture: str) -> tuple[bool, ...]:
        config = ModelConfig.from_mapping(LLAMA | {"architectures": [architecture]})
        return config.qkv_bias, config.o_bias, config.mlp_bias, config.qk_norm

    assert traits("LlamaForCausalLM") == (False, False, False, False)
    assert traits("MistralForCausalLM") == (False, False, False, False)
    assert traits("Qwen2ForCausalLM") == (True, False, False, False)
    assert traits("Qwen3ForCausalLM") == (False, False, False, True)


def test_the_head_size_is_derived_only_where_it_is_not_told():
    assert ModelConfig.from_mapping(LLAMA).head_size == 64
    assert ModelConfig.from_mapping(LLAMA | {"head_dim": 96}).head_size == 96


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel.*LlamaForCausalLM, MiMo"),
        ({"architectures": None}, "must name one architecture"),
        ({"rope_scaling": {"rope_type": "dynamite", "factor": 2.0}}, "'dynamite'.*llama3.*yarn"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "'dynamic' needs factor"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "needs long_factor, short_f"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": "2"}},
            "long_factor must be a list",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            "short_factor has 1 numbers",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs high_freq_factor, low_"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "mscale": 1.0}}, "mscale"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.5}}, "at most 1"),
        ({"partial_rotary_factor": 0}, "partial_rotary_factor must be above 0"),
        ({"partial_rotary_factor": 0.01}, "turns 0 of"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"num_key_value_heads": 5}, "num_attention_heads .32. must be a multiple"),
        ({"vocab_size": None}, "vocab_size is missing"),
        ({"hidden_size": "2048"}, "hidden_size must be a positive whole number, got '2048'"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive"),
        ({"head_dim": 63}, "head_dim must be even"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0, got 'small'"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps must be a number above 0"),
        ({"rope_theta": "1e4"}, "rope_theta must be a number above 0, got '1e4'"),
        ({"rope_parameters": {"rope_theta": [1]}}, "rope_theta must be a number above 0"),
        ({"rope_scaling": 2.0}, "rope_scaling must be an object, got 2.0"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_mapping(LLAMA | changes)


@pytest.mark.parametrize(
    ("layer_types", "message"),
    [(["full_attention"], "1 entries for 4 layers"), (["chunked_attention"] * 4, "chunked_att")],
)
def test_layer_types_must_fit_the_layers(layer_types, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_mapping(QWEN2 | {"use_sliding_window": True, "layer_types": layer_types})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": 5}, "layer_types must be a list"),
        ({"max_window_layers": "two"}, "max_window_layers must be a whole number, got 'two'"),
    ],
)
def test_what_says_where_windows_are_must_be_of_its_type(changes, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_mapping(QWEN2 | {"use_sliding_window": True} | changes)


def test_numbers_that_are_null_are_as_if_they_were_missing():
    config = ModelConfig.from_mapping(LLAMA | {"rms_norm_eps": None, "rope_theta": None})
    assert (config.rms_norm_eps, config.rope.theta) == (1e-6, 10000.0)


def test_files_that_cannot_be_read_are_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read .*config\.json"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json is not valid JSON"):
        ModelConfig.from_directory(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="must hold a JSON object"):
        ModelConfig.from_directory(tmp_path)


def test_a_directory_gives_both_files(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 3}')

    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (3,)
