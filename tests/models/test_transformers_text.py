"""Families that read pictures too: what reads texts is all that runs, and all that takes memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)

from outdraft.core.errors import ConfigError
from outdraft.models.choose import checkpoint_dtype
from tests.models.checkpoints import save
from tests.models.families import PICTURE, PICTURES, randomised_family
from tests.models.test_transformers_model import Texts, loaded


@pytest.mark.parametrize("name", PICTURES)
def test_texts_read_what_the_librarys_whole_model_reads(name: str, tmp_path: Path) -> None:
    oracle = randomised_family(name)
    save(oracle, tmp_path)
    model = loaded(tmp_path)
    texts = Texts(model)
    texts.ids_2T.clamp_(max=PICTURE - 4)
    oracle = oracle.double()
    oracle.set_experts_implementation("eager")
    with torch.inference_mode():
        want_2TV = oracle(input_ids=texts.ids_2T, use_cache=False).logits
    torch.testing.assert_close(texts.read()[0], want_2TV, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", sorted(PICTURES.keys() - {"qwen-2.5-vl"}))
def test_towers_for_pictures_take_no_memory(name: str, tmp_path: Path) -> None:
    """As much as a checkpoint of the text's family, which Qwen 2.5 VL has none of, takes."""
    save(randomised_family(name), tmp_path / "both")
    config = PICTURES[name]().get_text_config()
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    config.architectures = [kind.__name__]
    save(kind(config), tmp_path / "text")
    both, text = loaded(tmp_path / "both"), loaded(tmp_path / "text")
    assert both.memory_bytes == text.memory_bytes
    assert len(list(both.parameters())) == len(list(text.parameters()))


@pytest.mark.parametrize("said", [[3, 5], None])
def test_texts_end_as_the_part_for_texts_says(said: list[int] | None, tmp_path: Path) -> None:
    """If it says nothing, as its family's do."""
    save(randomised_family("gemma-3-vl"), tmp_path)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    raw = json.loads((tmp_path / "config.json").read_text())
    for part in (raw, raw["text_config"]):
        for name in ("eos_token_id", "dtype", "torch_dtype"):
            part.pop(name, None)
    raw["text_config"] |= {"dtype": "bfloat16"} | ({"eos_token_id": said} if said else {})
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert loaded(tmp_path).config.eos_token_ids == (tuple(said) if said else (1,))
    assert checkpoint_dtype(tmp_path) == "bfloat16"


def test_an_architecture_that_is_not_of_the_family_is_refused(tmp_path: Path) -> None:
    save(randomised_family("gemma-3-vl"), tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["architectures"] = ["Gemma3ForSequenceClassification"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="for gemma3 it has Gemma3ForConditionalGeneration"):
        loaded(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PICTURES)
def test_weights_may_be_random(name: str, tmp_path: Path) -> None:
    config = PICTURES[name]()
    config.architectures = [MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__]
    config.save_pretrained(tmp_path)
    one, other = (Texts(loaded(tmp_path, has_random_weights=True)) for _ in range(2))
    assert torch.equal(one.read()[0], other.read()[0])
