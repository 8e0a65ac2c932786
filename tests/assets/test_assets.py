"""What the package says it has, it has."""

import json

import pytest

from outdraft import assets
from outdraft.core.errors import ConfigError


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """Where the package looks for its files; empty."""
    monkeypatch.setattr(assets, "files", lambda package: tmp_path)
    return tmp_path


def test_a_head_is_found_where_its_recipe_puts_it(folder):
    assert assets.available_heads() == ()
    (folder / "mlp_speculator").mkdir()
    (folder / "eagle3").mkdir()
    assert assets.available_heads() == ("eagle3", "mlp_speculator")
    assert assets.head_path("eagle3") == folder / "eagle3"


@pytest.mark.parametrize("method", assets.HEADS)
def test_a_missing_head_is_named_with_the_recipe_that_makes_it(folder, method):
    with pytest.raises(ConfigError, match=f"no embedded {method}: recipes/draft_heads makes it"):
        assets.head_path(method)


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("find", [assets.target_path, assets.drafter_path, assets.prompts])
def test_a_missing_part_of_the_pair_is_named_with_its_recipe(find):
    with pytest.raises(ConfigError, match=r"no embedded .*: recipes/embedded_pair makes it"):
        find()


def test_every_embedded_head_is_a_checkpoint_for_the_embedded_target():
    target = json.loads((assets.target_path() / "config.json").read_text())
    for method in assets.available_heads():
        head = json.loads((assets.head_path(method) / "config.json").read_text())
        assert head["vocab_size"] == target["vocab_size"]
        assert (assets.head_path(method) / "model.safetensors").stat().st_size > 2**20
