"""A drafter whose ids may mean something else is refused, or warned of where nobody can tell."""

import logging
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outdraft.core.errors import ConfigError
from outdraft.engine.build import check_vocabularies
from outdraft.models.llama import CausalLM
from tests.oracle.engines import VOCAB_SIZE, models, pair


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "target", tmp_path / "drafter"
    for path in paths:
        path.mkdir()
        shutil.copy(pair("qwen2").target / "tokenizer.json", path)
    return paths


@pytest.fixture
def loaded() -> tuple[CausalLM, CausalLM]:
    both = models("qwen2", "other", "float32", "cpu", None)
    assert both.drafter is not None
    return both.target, both.drafter


def check(folders: tuple[Path, Path], loaded: tuple[CausalLM, CausalLM]) -> None:
    check_vocabularies(folders[0], loaded[0], folders[1], loaded[1])


def test_equal_vocabularies_are_fine_and_nothing_is_said(folders, loaded, caplog):
    check(folders, loaded)
    assert caplog.records == []


def test_other_words_of_the_same_number_are_refused(folders, loaded):
    other = Tokenizer(WordLevel({f"x{i}": i for i in range(VOCAB_SIZE)}, unk_token="x0"))
    other.save(str(folders[1] / "tokenizer.json"))
    with pytest.raises(ConfigError, match="another vocabulary"):
        check(folders, loaded)


@pytest.mark.parametrize("missing", [0, 1])
def test_where_a_tokenizer_is_missing_a_warning_names_it(folders, loaded, caplog, missing: int):
    (folders[missing] / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        check(folders, loaded)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{folders[missing]} has no tokenizer.json" in record.getMessage()
    assert "only the sizes were compared" in record.getMessage()
