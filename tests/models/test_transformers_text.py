"""Families that read pictures too: what reads texts is all that runs, and all that takes memory."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Config,
    Llama4Config,
    LlavaConfig,
    Mistral3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2_5_VLConfig,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from outdraft.core.errors import ConfigError
from tests.models.checkpoints import TINY, save
from tests.models.families import randomise
from tests.models.test_transformers_model import Texts, loaded

_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 28,
    "patch_size": 14,
}
_WINDOW = {"sliding_window": 7}
_GEMMA_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
_PICTURE = TINY["vocab_size"] - 1  # the token that stands for pictures


def _gemma3() -> PretrainedConfig:
    text = TINY | _WINDOW | {"layer_types": _GEMMA_TYPES}
    tower = _TOWER | {"model_type": "siglip_vision_model"}
    return Gemma3Config(text_config=text, vision_config=tower, image_token_index=_PICTURE)


def _llama4() -> PretrainedConfig:
    text = TINY | _EXPERTS | {"attention_chunk_size": 16, "pad_token_id": 2}
    sizes = "vision_output_dim", "projector_input_dim", "projector_output_dim"
    tower = _TOWER | {"intermediate_size": 64} | dict.fromkeys(sizes, 32)
    return Llama4Config(text_config=text, vision_config=tower)


def _llava() -> PretrainedConfig:
    text = TINY | _WINDOW | {"model_type": "mistral"}
    tower = _TOWER | {"model_type": "clip_vision_model"}
    return LlavaConfig(text_config=text, vision_config=tower, image_token_index=_PICTURE)


def _mistral3() -> PretrainedConfig:
    text = TINY | _WINDOW | {"model_type": "mistral"}
    tower = _TOWER | {"model_type": "pixtral"}
    return Mistral3Config(text_config=text, vision_config=tower, image_token_index=_PICTURE)


def _qwen2_5_vl() -> PretrainedConfig:
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4}
    text = TINY | {"rope_parameters": _ROPE}
    return Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower | {"out_hidden_size": 32},
        image_token_id=_PICTURE,
        video_token_id=_PICTURE - 1,
        vision_start_token_id=_PICTURE - 2,
        vision_end_token_id=_PICTURE - 3,
    )


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "gemma-3": _gemma3,
    "llama-4": _llama4,
    "llava": _llava,
    "mistral-3": _mistral3,
    "qwen-2.5-vl": _qwen2_5_vl,
}


def _oracle(name: str) -> PreTrainedModel:
    config = CONFIGS[name]()
    kind: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    config.architectures = [kind.__name__]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return randomise(kind(config))


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_read_what_the_librarys_whole_model_reads(name: str, tmp_path: Path) -> None:
    oracle = _oracle(name)
    save(oracle, tmp_path)
    model = loaded(tmp_path)
    texts = Texts(model)
    texts.ids_2T.clamp_(max=_PICTURE - 4)
    oracle = oracle.double()
    oracle.set_experts_implementation("eager")
    with torch.inference_mode():
        want_2TV = oracle(input_ids=texts.ids_2T, use_cache=False).logits
    torch.testing.assert_close(texts.read()[0], want_2TV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(CONFIGS.keys() - {"qwen-2.5-vl"}))
def test_towers_for_pictures_take_no_memory(name: str, tmp_path: Path) -> None:
    """As much as a checkpoint of the text's family, which Qwen 2.5 VL has none of, takes."""
    save(_oracle(name), tmp_path / "both")
    config = CONFIGS[name]().get_text_config()
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [kind.__name__]
    save(kind(config), tmp_path / "text")
    both, text = loaded(tmp_path / "both"), loaded(tmp_path / "text")
    assert both.memory_bytes == text.memory_bytes
    assert len(list(both.parameters())) == len(list(text.parameters()))


def test_an_architecture_that_is_not_of_the_family_is_refused(tmp_path: Path) -> None:
    save(_oracle("gemma-3"), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["architectures"] = ["Gemma3ForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="for gemma3 it has Gemma3ForConditionalGeneration"):
        loaded(tmp_path)
