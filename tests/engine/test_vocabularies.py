"""A drafter's ids mean the target's, or are translated; where nobody can tell, it is said."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outdraft.core.errors import ConfigError
from outdraft.drafting.device.translated_model import VocabularyMap
from outdraft.loading.methods import check_vocabularies
from tests.oracle.engines import VOCAB_SIZE, models, pair


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "target", tmp_path / "drafter"
    for path in paths:
        path.mkdir()
        shutil.copy(pair("qwen2").target / "tokenizer.json", path)
    return paths


def check(
    folders: tuple[Path, Path], *, drafter_size: int = VOCAB_SIZE, least_overlap: float = 0.1
) -> VocabularyMap | None:
    config = models("qwen2", None, "float32", "cpu", "auto").target.config
    target: Any = SimpleNamespace(config=config)  # of the models only their sizes matter
    drafter: Any = SimpleNamespace(config=replace(config, vocab_size=drafter_size))
    return check_vocabularies(folders[0], target, folders[1], drafter, least_overlap)


def save_words(path: Path, names: list[str]) -> None:
    numbered = {name: number for number, name in enumerate(names)}
    Tokenizer(WordLevel(numbered, unk_token="?")).save(str(path / "tokenizer.json"))


def said(caplog) -> list[logging.LogRecord]:
    """What was logged, but for how long loading took: that is said by the test that loads first."""
    return [record for record in caplog.records if record.name != "outdraft.loading.models"]


def test_equal_vocabularies_are_fine_and_nothing_is_said(folders, caplog):
    with caplog.at_level(logging.INFO):
        assert check(folders) is None
    assert said(caplog) == []


def test_other_words_are_translated_and_the_overlap_is_said(folders, caplog):
    save_words(folders[1], [f"w{i}" for i in range(51)] + ["x"])
    with caplog.at_level(logging.INFO):
        found = check(folders)
    assert found is not None
    assert found.num_shared == 50  # w0 is the target's unknown token
    [record] = said(caplog)
    assert record.levelno == logging.INFO
    assert record.getMessage() == (
        f"the draft model {folders[1]} shares 50 of 61 ids (82.0%) of the target's vocabulary, "
        "96.2% of its own"
    )


def test_the_same_words_in_a_wider_network_are_all_shared(folders):
    found = check(folders, drafter_size=VOCAB_SIZE + 3)
    assert found is not None
    assert found.draft_to_target_U.tolist() == [*range(VOCAB_SIZE), -1, -1, -1]


def test_too_small_an_overlap_is_refused_by_both_numbers(folders):
    save_words(folders[1], ["x", "w3", "w5", "y"])
    message = r"shares 2 of 61 ids \(3.3%\).* less than min_vocabulary_overlap=0.1: .* lower it"
    with pytest.raises(ConfigError, match=message):
        check(folders)
    assert check(folders, least_overlap=0.03) is not None


def test_a_drafter_that_shares_nothing_is_refused_whatever_is_asked(folders):
    save_words(folders[1], [f"x{i}" for i in range(VOCAB_SIZE)])
    with pytest.raises(ConfigError, match="shares 0 of 61 ids"):
        check(folders, least_overlap=0.0)


@pytest.mark.parametrize("missing", [0, 1])
def test_where_a_tokenizer_is_missing_a_warning_names_it(folders, caplog, missing: int):
    (folders[missing] / "tokenizer.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert check(folders) is None
    [record] = said(caplog)
    assert record.levelno == logging.WARNING
    assert f"{folders[missing]} has no tokenizer.json" in record.getMessage()
    assert "only the sizes were compared" in record.getMessage()


@pytest.mark.parametrize("missing", [0, 1])
def test_another_size_without_a_tokenizer_is_refused(folders, missing: int):
    (folders[missing] / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"another vocabulary .* has no tokenizer.json"):
        check(folders, drafter_size=VOCAB_SIZE + 3)
