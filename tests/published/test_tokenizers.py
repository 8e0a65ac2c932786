"""Tokenizers and chat templates of published files; the oracles are llama.cpp and transformers."""

import io
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from outdraft.core.structured_outputs import StructuredOutput
from outdraft.models.checkpoints.gguf_file import open_gguf
from outdraft.models.checkpoints.gguf_metadata import TokenKind, vocabulary_of
from outdraft.structured.compiler import GrammarCompiler
from outdraft.text.chat import ChatTemplate
from outdraft.text.detokenizer import Detokenizer
from outdraft.text.tokenizer import SPLITS, load_tokenizer
from tests.engine.trained_tokenizers import corpus as documents
from tests.published.llama_vocabulary import LlamaVocabulary
from tests.published.texts import texts

NAMES = ("smollm2", "gemma270", "coder05", "coder15")
NUM_TEXTS = 2100


@pytest.fixture(scope="module", params=NAMES)
def path(request: pytest.FixtureRequest, published: Callable[[str], Path]) -> Path:
    return published(request.param)


@cache
def vocabulary(path: Path) -> tuple[list[str], np.ndarray, tuple[int, ...]]:
    return vocabulary_of(open_gguf(path).values)


@cache
def oracle(path: Path) -> LlamaVocabulary:
    return LlamaVocabulary(path)


@cache
def tokenizer(path: Path, *, parse_special: bool = True) -> Tokenizer:
    made = load_tokenizer(path)
    assert made is not None
    made.encode_special_tokens = not parse_special
    return made


@cache
def corpus(path: Path) -> list[str]:
    kinds = (TokenKind.CONTROL, TokenKind.UNKNOWN, TokenKind.USER_DEFINED)
    tokens, kinds_V, _ = vocabulary(path)
    special = [tokens[i] for i, kind in enumerate(kinds_V) if kind in kinds]
    return texts(20, NUM_TEXTS, special[:60])


@pytest.mark.slow
@pytest.mark.parametrize("add_special", [False, True])
@pytest.mark.parametrize("parse_special", [False, True])
def test_ids_are_those_of_llama_cpp(path: Path, add_special: bool, parse_special: bool):
    ours, theirs = tokenizer(path, parse_special=parse_special), oracle(path)
    for text in corpus(path):
        ids = ours.encode(text, add_special_tokens=add_special).ids
        options = {"add_special": add_special, "parse_special": parse_special}
        assert ids == theirs.encode(text, **options), text


@pytest.mark.parametrize("show_special", [False, True])
def test_texts_of_ids_are_those_of_llama_cpp(path: Path, show_special: bool):
    ours, theirs = tokenizer(path), oracle(path)
    for text in corpus(path):
        ids = ours.encode(text).ids
        shown = ours.decode(ids, skip_special_tokens=not show_special)
        assert shown == theirs.decode(ids, show_special=show_special), text


@settings(max_examples=300, deadline=None)
@given(data=st.data(), show_special=st.booleans())
def test_what_a_stream_shows_adds_up_to_the_text_of_all_ids(
    path: Path, data: st.DataObject, show_special: bool
):
    """Any ids, parts of characters among them; what is no character is replaced."""
    last = tokenizer(path).get_vocab_size() - 1
    drawn = st.lists(st.integers(0, last), min_size=1, max_size=12)
    written = st.sampled_from(corpus(path)).map(lambda text: tokenizer(path).encode(text).ids)
    ids = data.draw(drawn | written)
    ours = Detokenizer(tokenizer(path), (), skip_special_tokens=not show_special)
    deltas: list[str] = []
    for token_id in ids:
        before = len(ours.text)
        ours.push(token_id)
        deltas.append(ours.text[before:])
    before = len(ours.text)
    ours.finish()
    whole = oracle(path).decode(ids, show_special=show_special)
    assert "".join([*deltas, ours.text[before:]]) == whole


def test_an_output_ends_where_llama_cpp_ends_it(path: Path):
    assert set(vocabulary(path)[2]) == oracle(path).ends()


def test_an_output_can_keep_to_a_form(path: Path):
    ours = tokenizer(path)
    schema = {"type": "object", "properties": {"é日": {"type": "integer"}}, "required": ["é日"]}
    form = StructuredOutput("json_schema", json.dumps(schema))
    grammar = GrammarCompiler(ours, len(vocabulary(path)[0])).compile(form)
    for text, keeps in (('{"é日":12}', True), ('{"é日":"12"}', False)):
        matcher = grammar.matcher(set(vocabulary(path)[2]))
        for token_id in ours.encode(text, add_special_tokens=False).ids:
            matcher.advance(token_id)
        assert (matcher.failure is None) is keeps


@pytest.fixture(scope="module")
def merged() -> dict[str, Any]:
    """A byte-level vocabulary whose tokens may hold any characters beside each other."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=3000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<s>", "</s>"],
        show_progress=False,
    )
    trained.train_from_iterator(texts(3, 1500), trainer)
    ids = trained.get_vocab()
    merges = json.loads(trained.to_str())["model"]["merges"]
    return {
        "tokens": sorted(ids, key=ids.__getitem__),
        "merges": [" ".join(pair) for pair in merges],
    }


@pytest.mark.slow
@pytest.mark.few(20)
@pytest.mark.parametrize("name", SPLITS)
def test_texts_are_split_as_llama_cpp_does_it(name: str, merged: dict[str, Any], tmp_path: Path):
    path = tmp_path / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(name)
    writer.add_token_list(merged["tokens"])
    writer.add_token_types([3, 3, *[1] * (len(merged["tokens"]) - 2)])
    writer.add_token_merges(merged["merges"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    _write(writer)
    ours, theirs = load_tokenizer(path), LlamaVocabulary(path)
    assert ours is not None
    for text in texts(4, 1000):
        assert ours.encode(text).ids == theirs.encode(text, add_special=True, parse_special=True), (
            text
        )


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()


@pytest.fixture(scope="module", params=["a model", "Phi-3"])
def sentencepiece(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary of SentencePiece's, whose texts begin with a blank; by names of models."""
    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in documents() for line in text.splitlines()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=1000,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<x>", "<y>"],
        control_symbols=["<|endoftext|>"],
        minloglevel=2,
    )
    trained = SentencePieceProcessor(model_proto=model.getvalue())
    ids = range(trained.get_piece_size())
    path = tmp_path_factory.mktemp("sentencepiece") / "vocabulary.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(request.param)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([trained.id_to_piece(one) for one in ids])
    writer.add_token_scores([trained.get_score(one) for one in ids])
    writer.add_token_types([int(_kind(trained, one)) for one in ids])
    _write(writer)
    return path


def _kind(trained: SentencePieceProcessor, token_id: int) -> TokenKind:
    if trained.is_control(token_id):
        return TokenKind.CONTROL
    if trained.is_unknown(token_id):
        return TokenKind.UNKNOWN
    if trained.is_byte(token_id):
        return TokenKind.BYTE
    is_added = trained.id_to_piece(token_id) in ("<x>", "<y>")
    return TokenKind.USER_DEFINED if is_added else TokenKind.NORMAL


@pytest.mark.parametrize("parse_special", [False, True])
def test_texts_begin_with_a_blank_where_llama_cpp_begins_them_so(
    sentencepiece: Path, parse_special: bool
):
    ours, theirs = tokenizer(sentencepiece, parse_special=parse_special), oracle(sentencepiece)
    for text in texts(4, 1000, ["<s>", "</s>", "<unk>", "<x>", "<y>", "<x> a", "</s> b"]):
        if re.search(
            r">\s*[^\S \t-\r]", text
        ):  # llama.cpp knows ASCII's blanks only after Phi's tokens
            continue
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text, add_special=True, parse_special=parse_special), text


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": 'Finds <files> & "more", é.',
            "parameters": {
                "type": "object",
                "properties": {"name": {"type": "string"}, "depth": {"type": "integer"}},
                "required": ["name"],
            },
        },
    }
]
CALL = {
    "id": "call00001",
    "type": "function",
    "function": {"name": "find", "arguments": {"name": "a's <b>", "depth": 2, "é": None}},
}
USER = {"role": "user", "content": "Where is it? <|im_end|>\n "}
CONVERSATIONS = {
    "a question": [USER],
    "system": [{"role": "system", "content": "Be brief."}, USER],
    "turns": [USER, {"role": "assistant", "content": "There.\n"}, USER],
    "a call": [USER, {"role": "assistant", "content": "", "tool_calls": [CALL]}],
    "a result": [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "tool_call_id": "call00001", "content": '{"found": ["ä"]}'},
        {"role": "tool", "tool_call_id": "call00001", "content": "nothing"},
        USER,
    ],
}


@pytest.mark.parametrize("generates", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_conversations_are_written_as_transformers_writes_them(
    path: Path, conversation: str, tools: list[dict[str, Any]] | None, generates: bool
):
    ours = ChatTemplate.from_directory(path)
    source = open_gguf(path).values.get("tokenizer.chat_template")
    if source is None:
        assert ours is None
        pytest.skip("the file has no template")
    assert ours is not None
    tokens, _, _ = vocabulary(path)
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")),
        bos_token=tokens[open_gguf(path).values["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[open_gguf(path).values["tokenizer.ggml.eos_token_id"]],
    )
    messages = CONVERSATIONS[conversation]
    wanted = theirs.apply_chat_template(
        messages,
        chat_template=source,
        tools=tools,
        add_generation_prompt=generates,
        tokenize=False,
    )
    assert ours.render(messages, tools=tools, add_generation_prompt=generates) == wanted
