"""A tokenizer in SentencePiece's own form is converted, and means what it meant."""

import io
import json
import sys
from pathlib import Path

import pytest
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from outdraft.core.errors import ConfigError
from outdraft.text.tokenizer import load_tokenizer
from tests.engine.byte_level import CORPUS

# No text begins with a blank: transformers' tokenizers take it for the one that pieces begin with.
TEXTS = [*CORPUS, "the cat  stops", "here ", "żółw\n\tx", "日本 the 猫"]


def checkpoint(path: Path, model_type: str = "bpe") -> SentencePieceProcessor:
    """As Llama 2's: pieces, and bytes for what they lack."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20),
        model_writer=model,
        model_type=model_type,
        vocab_size=320,
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    (path / "tokenizer.model").write_bytes(model.getvalue())
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "legacy": True}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return SentencePieceProcessor(model_proto=model.getvalue())


def test_a_converted_tokenizer_gives_the_ids_of_sentencepiece(tmp_path):
    theirs = checkpoint(tmp_path)
    ours = load_tokenizer(tmp_path)
    assert ours is not None
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ours.encode(text).ids == [theirs.bos_id(), *ids], text
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids) == theirs.decode(ids), text


def test_without_the_converter_the_error_has_the_command(tmp_path, monkeypatch):
    checkpoint(tmp_path)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    assert f"from_pretrained('{tmp_path}').save_pretrained('{tmp_path}')" in str(caught.value)
    assert "pip install transformers" in str(caught.value)


def test_a_file_that_cannot_be_converted_is_refused(tmp_path):
    checkpoint(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"nothing of the kind")
    with pytest.raises(ConfigError, match=r"it fails: "):
        load_tokenizer(tmp_path)


def test_a_converted_tokenizer_that_was_saved_is_read_without_the_converter(tmp_path, monkeypatch):
    checkpoint(tmp_path)
    converted = load_tokenizer(tmp_path)
    assert converted is not None
    converted.save(str(tmp_path / "tokenizer.json"))
    monkeypatch.setitem(sys.modules, "transformers", None)
    again = load_tokenizer(tmp_path)
    assert again is not None
    assert [again.encode(text).ids for text in TEXTS] == [
        converted.encode(text).ids for text in TEXTS
    ]
