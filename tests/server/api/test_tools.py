"""Tool call parsers: cut anywhere, the same calls and the same text."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.server.api.calls import (
    FORCED,
    MARKS,
    CallFinder,
    CallReader,
    whole_calls,
)

HERMES = '<tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call>'
F = ("f", '{"a": [1, "é"]}')
G = ("g", "{}")
LLAMA = '{"name": "f", "parameters": {"a": [1, "é"]}}'
BARE = '{"name": "f", "arguments": {"a": [1, "é"]}}'


def parser_of(name: str) -> CallFinder:
    if name == "forced":
        return CallFinder(FORCED, ["f", "g"])
    return CallFinder(MARKS[name], ["f", "g"] if name == "qwen2_5_coder" else ())


def parse(name: str, pieces: list[str]) -> list:
    """All that a parser gives, with texts that stand together joined, and so with calls."""
    parser = parser_of(name)
    result, of_call = [], []
    parts = [part for text in pieces for part in parser.push(text)]
    for kind, text in [*parts, *parser.push("", is_last=True)]:
        if kind == "call":
            of_call = [(kind, text)]
            result += whole_calls(of_call)
        elif kind == "arguments":
            of_call.append((kind, text))
            assert isinstance(result[-1], tuple), "text within a call"
            result[-1:] = whole_calls(of_call)
        elif result and isinstance(result[-1], str):
            result[-1] += text
        elif text != "":
            result.append(text)
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
    ('<tool_call>{"name": "g"}</tool_call>', [G]),
    ('<tool_call>{"name": "g", "arguments": null}</tool_call>', [G]),
    (
        '<tool_call>{"name": "g", "arguments": 5}</tool_call>',
        ['<tool_call>{"name": "g", "arguments": 5}</tool_call>'],
    ),
    ('<tool_call>{"arguments": {}, "name": "g"}</tool_call>', [G]),
    # A stray mark before a call, or none after it; a bracket too few.
    (f"<tool_call> I will <tool_call>\n{BARE}\n</tool_call>", ["<tool_call> I will", F]),
    (f"<tool_call>{{<tool_call>{BARE}</tool_call>", ["<tool_call>{", F]),
    (f"<tool_call><tool_call>{BARE}</tool_call>.", ["<tool_call>", F, "."]),
    (f"<tool_call>{BARE}\n<tool_call>{BARE}", [F, F]),
    (f"<tool_call>{BARE}\n{BARE}</tool_call>", [F, F]),
    (f"<tool_call>{BARE} so", [F, "so"]),
    (
        f"<tool_call>{BARE[:-1]}</tool_call> <tool_call>{BARE[:-2]}\n</tool_call>",
        [F, ("f", F[1][:-1])],
    ),
    # Cut short: a call as soon as its arguments have begun.
    ('<tool_call>{"name": "f", "arguments": {"a": "x\\', [("f", '{"a": "x\\')]),
    ('<tool_call>{"name": "f", "argu', ['<tool_call>{"name": "f", "argu']),
    ("<tool_call>{'name': 'f'}</tool_call>", ["<tool_call>{'name': 'f'}</tool_call>"]),
    (
        '<tool_call>{"name": "f", "arguments": {"a": 1 , "b": "} " } , "id": 7 }</tool_call>',
        [("f", '{"a": 1 , "b": "} " }')],
    ),
    ('<tool_call>{"name": "g", "arguments": "{}"}</tool_call>', [("g", "{}")]),
    (
        '<tool_call>{"name": "g", "arguments": {"t": "</tool_call>"}}</tool_call>',
        [("g", '{"t": "</tool_call>"}')],
    ),
    (
        '<tool_call>{"name": "g", "arguments": {"t": "\\ud800"}}</tool_call>',
        [("g", '{"t": "\\ud800"}')],
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
    (f"{LLAMA} and more", [F, "and more"]),
    (f"text {LLAMA}", [f"text {LLAMA}"]),
    ('{"name": "f", "para', ['{"name": "f", "para']),
]
OTHER_JSON = '```json\n{"name": "h", "arguments": {}}\n```\n\nor `{"a": 1}`.'
CODER_CASES = [
    ("just text, `code` and ```x```", ["just text, `code` and ```x```"]),
    (f"```json\n{BARE}\n```", [F]),
    (f"First.\n\n```json\n{BARE}\n```\n\n```json\n{BARE}\n```\nThen.", ["First.", F, F, "Then."]),
    (f"```json\n{BARE}\n{BARE}\n```", [F, F]),
    (f"```json\n[\n  {BARE},\n  {BARE}\n]\n```", [F, F]),
    (f"```\n{BARE}\n```\n", [F]),
    (f"```xml\n{BARE}\n```", [F]),
    (f"<tool_call>\n{BARE}\n</tool_call>\n{HERMES}", [F, F]),
    (f"<tools>\n{BARE}\n</tools>", [F]),
    (BARE, [F]),
    (f"{BARE}\n{BARE}", [F, F]),
    (f"[{BARE}, {BARE}]", [F, F]),
    ('```json\n{"name": "g"}\n```', [G]),
    (OTHER_JSON, [OTHER_JSON]),
    ('```python\nprint({"name": "f"})\n```', ['```python\nprint({"name": "f"})\n```']),
    ("```json\n{", ["```json\n{"]),
    ('{"name": "Ann", "arguments": {}}', ['{"name": "Ann", "arguments": {}}']),
]
FORCED_CASES = [
    ("", []),
    ("[", []),
    ('{"name":"f","arguments":{"a": [1, "é"]}}', [F]),
    ('[{"name":"f","arguments":{"a": [1, "é"]}},{"name":"g","arguments":{}}]', [F, G]),
    ('[{"name":"g","arguments":{}},{"na', [G]),
    ('[{"name":"g","arguments":{}},{"name":"f', [G, ("f", "")]),
    ('[{"name":"f","arguments":{"a":"} ', [("f", '{"a":"} ')]),
]
CASES = [
    (name, *case)
    for name, cases in (
        ("hermes", HERMES_CASES),
        ("llama3_json", LLAMA_CASES),
        ("qwen2_5_coder", CODER_CASES),
        ("forced", FORCED_CASES),
    )
    for case in cases
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_calls_are_found_and_everything_else_is_text(name, text, expected):
    assert parse(name, [text]) == expected


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_one_cut_anywhere_changes_nothing(name, text, expected):
    for cut in range(len(text) + 1):
        assert parse(name, [text[:cut], text[cut:]]) == expected
    assert parse(name, list(text)) == expected


PARTS = [
    HERMES,
    LLAMA,
    "```json\n",
    "```",
    "<tools>",
    '{"name": "f", "arguments": {',
    '"',
    "\\",
    "]",
    "<tool_call>",
    "</tool_call>",
    "{",
    "}",
    " ",
    "\n",
    "x",
    "<",
    "a b",
    ";",
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.lists(st.integers(0, 200), max_size=5))
def test_any_text_cut_anyhow_parses_the_same(parts, cuts):
    text = "".join(parts)
    ends = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    pieces = [text[a:b] for a, b in pairwise(ends)]
    for name in MARKS:
        whole = parse(name, [text])
        assert parse(name, pieces) == whole
        kept = [piece for piece in whole if isinstance(piece, str)]
        if not any(isinstance(piece, tuple) for piece in whole):
            assert "".join(kept) == text


def test_text_is_not_held_back_longer_than_needed():
    parser = parser_of("hermes")
    assert parser.push("hello ") == [("text", "hello")]
    assert parser.push("you <to") == [("text", " you")]
    assert parser.push("day") == [("text", " <today")]
    assert parser_of("llama3_json").push("hello ") == [("text", "hello")]
    parser = parser_of("qwen2_5_coder")
    assert parser.push("hi") == [("text", "hi")]
    assert parser.push(' ```json\n{"ci') == [("text", ' ```json\n{"ci')]


@pytest.mark.parametrize("name", ["hermes", "forced"])
def test_arguments_come_as_they_are_written(name):
    parser = parser_of(name)
    start = "" if name == "forced" else "<tool_call>\n"
    assert parser.push(start + '{"name":"f","arguments":{"a"') == [
        ("call", "f"),
        ("arguments", '{"a"'),
    ]
    assert parser.push(": 1") == [("arguments", ": 1")]
    assert parser.push("}") == [("arguments", "}")]
    assert parser.push("}") == []


def test_the_name_of_a_forced_call_comes_before_its_arguments():
    parser = parser_of("forced")
    assert parser.push('[{"name":"f"') == []
    assert parser.push(',"argum') == [("call", "f")]


@pytest.mark.parametrize(
    "part", ["<tool_call>{", '<tool_call>{"', '<tool_call>{"a":"', "```{[", "{"]
)
def test_a_text_full_of_beginnings_is_read_in_time_of_its_length(part, monkeypatch):
    looked_at = [0]
    look_at = CallReader._look_at

    def counted(reader: CallReader, character: str) -> None:
        looked_at[0] += 1
        look_at(reader, character)

    monkeypatch.setattr(CallReader, "_look_at", counted)
    for name in MARKS:
        looked_at[0] = 0
        assert parse(name, [part] * 300) == [part * 300]
        assert looked_at[0] <= 4 * 300 * len(part)
