"""Which method a checkpoint is for, by the files that others write."""

from pathlib import Path

import pytest

from outdraft.models.drafters.config import drafter_method
from tests.models.checkpoints import VARIANTS, randomised, save
from tests.models.eagle_checkpoints import LAYOUTS
from tests.models.head_checkpoints import in_original_form, medusa_tensors, write
from tests.oracle.heads import random_head


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_of_eagle_is_told_apart(name: str, tmp_path: Path):
    layout = LAYOUTS[name]
    assert drafter_method(layout.save(tmp_path)) == ("eagle3" if layout.is_newer else "eagle")


@pytest.mark.parametrize(
    "method", ["eagle", "eagle3", "medusa", "mlp_speculator", "dflash", "dspark"]
)
def test_heads_are_told_apart(method: str, tmp_path: Path):
    target = save(randomised(VARIANTS["llama"]()), tmp_path / "target")
    assert drafter_method(random_head(method, target, tmp_path / "head")) == method


def test_the_original_form_of_medusa_is_known_by_its_only_key(tmp_path: Path):
    tensors = in_original_form(medusa_tensors(), 1)
    path = write(tmp_path, {"medusa_num_heads": 3}, tensors, "medusa_lm_head.safetensors")
    assert drafter_method(path) == "medusa"


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_language_model_is_no_drafter_of_another_method(name: str, tmp_path: Path):
    assert drafter_method(save(randomised(VARIANTS[name]()), tmp_path)) is None
