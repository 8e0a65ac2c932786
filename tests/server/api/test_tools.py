"""Tool call parsers: cut anywhere, the same calls and the same text."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.server.api.tools import ParsedCall, tool_call_parser

HERMES = '<tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call>'
F = ParsedCall("f", '{"a": [1, "é"]}')
LLAMA = '{"name": "f", "parameters": {"a": [1, "é"]}}'


def parse(name: str, pieces: list[str]) -> list:
    """All that a parser gives, with adjacent texts joined."""
    parser = tool_call_parser(name)
    result = []
    for piece in [*(p for text in pieces for p in parser.push(text)), *parser.finish()]:
        if isinstance(piece, str) and result and isinstance(result[-1], str):
            result[-1] += piece
        elif piece != "":
            result.append(piece)
    return result


HERMES_CASES = [
    ("just text \n", ["just text \n"]),
    ("", []),
    (HERMES, [F]),
    (f"First.\n\n{HERMES}\n{HERMES}\n", ["First.", F, F]),
    (f"{HERMES} and then {HERMES}", [F, "and then", F]),
    (HERMES.removesuffix("</tool_call>"), [F]),  # the model left the end out
    ("<tool_call>\n" + HERMES.removeprefix("<tool_call>"), [F]),
    ("a < b <tool_cal", ["a < b <tool_cal"]),
    ("<tool_call>not json</tool_call> x", ["<tool_call>not json</tool_call> x"]),
    ("<tool_call>[1]</tool_call>", ["<tool_call>[1]</tool_call>"]),
    ('<tool_call>{"name": 5}</tool_call>', ['<tool_call>{"name": 5}</tool_call>']),
    ('<tool_call>{"name": "g"}</tool_call>', [ParsedCall("g", "{}")]),
    ('<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', [ParsedCall("g", "{}")]),
    (
        '<tool_call>{"name": "g", "arguments": {"t": "</tool_call>"}}</tool_call>',
        [ParsedCall("g", '{"t": "</tool_call>"}')],
    ),
    (
        '<tool_call>{"name": "g", "arguments": {"t": "\\ud800"}}</tool_call>',
        [ParsedCall("g", '{"t": "\\ud800"}')],
    ),
]
LLAMA_CASES = [
    ("just text", ["just text"]),
    ("", []),
    ("  \n", ["  \n"]),
    (LLAMA, [F]),
    (f" \n{LLAMA}\n", [F]),
    (f"<|python_tag|>{LLAMA}; {LLAMA}", [F, F]),
    ("<|python", ["<|python"]),
    ("<b>bold</b>", ["<b>bold</b>"]),
    ('{"a": 1}', ['{"a": 1}']),
    (f"{LLAMA} and more", [f"{LLAMA} and more"]),
    (f"text {LLAMA}", [f"text {LLAMA}"]),
    ('{"name": "f", "para', ['{"name": "f", "para']),
]
CASES = [("hermes", *case) for case in HERMES_CASES] + [
    ("llama3_json", *case) for case in LLAMA_CASES
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_are_found_and_everything_else_is_text(name, text, expected):
    assert parse(name, [text]) == expected


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_one_cut_anywhere_changes_nothing(name, text, expected):
    for cut in range(len(text) + 1):
        assert parse(name, [text[:cut], text[cut:]]) == expected
    assert parse(name, list(text)) == expected


PARTS = [HERMES, LLAMA, "<tool_call>", "</tool_call>", "{", "}", " ", "\n", "x", "<", "a b", ";"]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.lists(st.integers(0, 200), max_size=5))
def test_any_text_cut_anyhow_parses_the_same(parts, cuts):
    text = "".join(parts)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    for name in ("hermes", "llama3_json"):
        whole = parse(name, [text])
        assert parse(name, pieces) == whole
        kept = [piece for piece in whole if isinstance(piece, str)]
        if not any(isinstance(piece, ParsedCall) for piece in whole):
            assert "".join(kept) == text


def test_text_is_not_held_back_longer_than_needed():
    parser = tool_call_parser("hermes")
    assert parser.push("hello ") == ["hello"]
    assert parser.push("you <to") == [" you"]
    assert parser.push("day") == [" <today"]
    parser = tool_call_parser("llama3_json")
    assert parser.push("hello ") == ["hello "]
