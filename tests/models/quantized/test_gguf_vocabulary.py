"""Which tokens end an output, and what kinds tokens have, as llama.cpp finds it by their texts."""

from typing import Any

import pytest

from outdraft.core.errors import ConfigError
from outdraft.models.checkpoints.gguf_metadata import TokenKind, vocabulary_of
from outdraft.text.tokenizer import tokenizer_of_gguf


def metadata(*tokens: str, kind: TokenKind = TokenKind.NORMAL, **named: int) -> dict[str, Any]:
    """A file with these tokens, all of one kind, and ids by the names of roles."""
    return {
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": [kind] * len(tokens),
        **{f"tokenizer.ggml.{role}_token_id": number for role, number in named.items()},
    }


@pytest.mark.parametrize(
    ("values", "ends"),
    [
        (metadata("a", "<|im_end|>", "<|endoftext|>", eos=2), ["<|endoftext|>", "<|im_end|>"]),
        (metadata("a", "b", "c", eos=2, eot=1, eom=0), ["c", "b", "a"]),
        (metadata("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>"), [0, 1, 2]),
        (metadata("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "a", eos=3), ["a"]),
        (metadata("a", "<|fim_pad|>", fim_pad=0), ["a"]),
        (metadata("<|end|>", "<|return|>", "<|call|>", eos=1), ["<|return|>", "<|call|>"]),
        (metadata("<|end|>", "<|return|>", eos=1), ["<|return|>", "<|end|>"]),
        (metadata("</s>", "<|tool_response>", eos=1), ["<|tool_response>"]),
        (metadata("</s>", "a", eos=1), ["a", "</s>"]),
        (metadata("a", eos=7), []),
        ({}, []),
    ],
)
def test_an_output_ends_at_every_token_that_llama_cpp_ends_it_at(
    values: dict[str, Any], ends: list[str | int]
):
    tokens, _, found = vocabulary_of(values)
    assert [tokens[one] for one in found] == [
        one if isinstance(one, str) else tokens[one] for one in ends
    ]


def test_marks_that_a_file_has_as_plain_text_are_special():
    _, kinds_V, _ = vocabulary_of(metadata("a", "</s>", "<|fim_prefix|>", "<|message|>", eos=1))
    normal, control, user = TokenKind.NORMAL, TokenKind.CONTROL, TokenKind.USER_DEFINED
    assert kinds_V.tolist() == [normal, control, control, user]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tokenizer.ggml.model": "bert"}, "must be gpt2 or llama, got 'bert'"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokens is missing or empty"),
        ({"tokenizer.ggml.model": "gpt2", **metadata("a", "a")}, "holds 'a' twice"),
        ({"tokenizer.ggml.model": "gpt2", **metadata("a")}, "merges is missing"),
        ({"tokenizer.ggml.model": "llama", **metadata("a")}, "a score for each token"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": ["a b"], **metadata("a")},
            "tokenizer.ggml.merges: ",
        ),
        (
            {
                "tokenizer.ggml.model": "gpt2",
                "tokenizer.ggml.merges": [],
                "tokenizer.ggml.add_bos_token": True,
                **metadata("a"),
            },
            "add_bos_token needs tokenizer.ggml.bos_token_id",
        ),
    ],
)
def test_a_vocabulary_that_no_tokenizer_can_be_made_of_is_refused(
    values: dict[str, Any], message: str
):
    with pytest.raises(ConfigError, match=message):
        tokenizer_of_gguf(values)


def sentencepiece(**more: Any) -> dict[str, Any]:
    """Bytes, letters, and pairs of them; the later a token, the lower its score."""
    special = ["<unk>", "<s>", "</s>"]
    pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = [*special, *pieces, "▁", "a", "b", "c", "bc", "ab", "▁a", "▁ab", "  ", "<x>"]
    kinds = [2, 3, 3, *[6] * 256, *[1] * 8, 4, 4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.scores": [-float(number) for number in range(len(tokens))],
        **more,
    }


@pytest.mark.parametrize(
    ("options", "text", "tokens", "decoded"),
    [
        ({}, "abc", ["<s>", "▁a", "bc"], "abc"),
        ({}, "abé", ["<s>", "▁ab", "<0xC3>", "<0xA9>"], "abé"),
        ({}, "a<x>b", ["<s>", "▁a", "<x>", "▁", "b"], "a<x> b"),
        ({}, "a  b", ["<s>", "▁a", "  ", "▁", "b"], "a   b"),
        ({"tokenizer.ggml.add_space_prefix": False}, "ab a", ["<s>", "ab", "▁a"], "ab a"),
        ({"tokenizer.ggml.add_bos_token": False}, "ab", ["▁ab"], "ab"),
        ({"general.name": "Phi 3"}, "a<x> b", ["<s>", "▁a", "<x>", "▁", "▁", "b"], "a<x>  b"),
        ({"general.name": "Phi-3 mini"}, "a<x> b", ["<s>", "▁a", "<x>", "▁", "b"], "a<x> b"),
        ({"tokenizer.ggml.add_eos_token": True}, "ab", ["<s>", "▁ab", "</s>"], "ab"),
    ],
)
def test_the_pair_of_the_highest_score_is_merged_first(
    options: dict[str, Any], text: str, tokens: list[str], decoded: str
):
    tokenizer = tokenizer_of_gguf(sentencepiece(**options))
    ids = tokenizer.encode(text).ids
    assert [tokenizer.id_to_token(one) for one in ids] == tokens
    assert tokenizer.decode(ids) == decoded
