import json
import threading
from dataclasses import replace
from typing import Any

import pytest

from outdraft.core.errors import RequestError
from outdraft.core.sampling import StructuredOutput
from outdraft.structured import compiler as compiler_module
from outdraft.structured import trial
from outdraft.structured.compiler import MAX_CACHED, GrammarCompiler
from tests.engine.byte_level import byte_ids, tokenizer
from tests.oracle.engines import tokenizer as word_tokenizer
from tests.structured.vocabularies import regex

VOCAB_SIZE = tokenizer().get_vocab_size()


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), VOCAB_SIZE)


def accepts(compiler: GrammarCompiler, structured: StructuredOutput, text: str) -> bool:
    matcher = compiler.compile(structured).matcher({1})
    for token_id in byte_ids(text):
        matcher.advance(token_id)
    return matcher.failure is None and matcher._state.is_accepting()


@pytest.mark.parametrize(
    ("kind", "text", "right", "wrong"),
    [
        ("json_object", "", '{"a":[1,true,null]}', "[1]"),
        ("json_schema", '{"enum": [1, "x"]}', '"x"', '"y"'),
        ("regex", "[a-z]+@[a-z]+", "me@home", "me@"),
        ("grammar", 'start: "yes" | "no" start', "nonoyes", "yesno"),
        ("json_schema", "true", "[1]", "[1"),
        ("choice", '["yes", "say \\"no\\"", "日本"]', 'say "no"', "no"),
        ("grammar", 'root ::= "yes" | "no" root', "nonoyes", "yesno"),
    ],
)
def test_every_kind_means_what_it_says(compiler, kind, text, right, wrong):
    structured = StructuredOutput(kind, text)
    assert accepts(compiler, structured, right)
    assert not accepts(compiler, structured, wrong)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("regex", "a(", "unclosed group"),
        ("regex", r"[^\s\S]", "no output follows it"),
        ("json_schema", "{", "json schema cannot be used"),
        ("json_schema", "[1]", "must be an object or boolean"),
        ("json_schema", '{"type": "objec"}', "Invalid type: objec"),
        ("json_schema", '{"if": {}}', "Unimplemented"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "not present in a registry"),
        ("json_schema", "[" * 100_000, "recursion limit"),
        ("json_schema", '{"type": "object"}, "lark_grammar": "x"', "Extra data"),
        ("grammar", "start: nothing", "unknown name"),
        ("grammar", "root ::= (", "GBNF"),
        ("grammar", "root ::= " + "(" * 20_000, "recursion"),
    ],
)
def test_what_is_wrong_is_refused_with_the_reason(compiler, kind, text, message):
    with pytest.raises(RequestError, match=message) as caught:
        compiler.compile(StructuredOutput(kind, text))
    assert caught.value.field == "structured"
    assert len(str(caught.value)) < 600


VALUE = {"a": 1, "b": [1, {"c": "x y"}], "d": {}}
ASKS = {
    "object": StructuredOutput("json_object"),
    "schema": StructuredOutput("json_schema", json.dumps({"required": list(VALUE)})),
    "own-wish": StructuredOutput(
        "json_schema", '{"type": "object", "x-guidance": {"whitespace_flexible": true}}'
    ),
}


@pytest.mark.parametrize("name", ASKS)
def test_json_has_no_white_space_unless_it_is_asked_for_and_then_not_without_end(compiler, name):
    compact = json.dumps(VALUE, separators=(",", ":"))
    spaced = [json.dumps(VALUE), *(json.dumps(VALUE, indent=by) for by in (0, 2, 4, "\t"))]
    too_much = [compact.replace(":", many) for many in (":  ", ":\n\n", ":\n" + " " * 21)]
    outside = [" " + compact, compact + "\n"]
    flexible = replace(ASKS[name], disable_any_whitespace=False)
    assert accepts(compiler, ASKS[name], compact)
    assert not any(accepts(compiler, ASKS[name], text) for text in (*spaced, *outside))
    assert all(accepts(compiler, flexible, text) for text in (compact, *spaced))
    assert not any(accepts(compiler, flexible, text) for text in (*too_much, *outside))


A, B = ({"properties": {name: {"type": "null"}}, "required": [name]} for name in "ab")
EXTRA, NESTED = '{"a":null,"b":null}', '{"a":null,"b":{"a":null,"c":1}}'
OBJECTS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "named": (A, EXTRA, False),
    "without-names": ({"type": "object"}, EXTRA, True),
    "said-to-be-open": ({**A, "additionalProperties": True}, EXTRA, True),
    "required-unnamed": ({"properties": {}, "required": ["a"]}, EXTRA, True),
    "nested": ({"properties": {"a": {}, "b": A}}, NESTED, False),
    "called-properties": ({"properties": {"properties": A}}, '{"properties":{"a":null}}', True),
    "referred": ({"anyOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, EXTRA, False),
    "one-of-all": ({"allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": A}}, EXTRA, False),
    "all-of": ({"allOf": [A, B]}, EXTRA, True),
    "beside": ({**A, "anyOf": [B]}, EXTRA, True),
    "constant": ({"const": {"properties": {"b": 1}}}, '{"properties":{"b":1}}', True),
}


@pytest.mark.parametrize("name", OBJECTS)
def test_objects_hold_what_their_schema_names_unless_it_says_more(compiler, name):
    schema, text, is_accepted = OBJECTS[name]
    structured = StructuredOutput("json_schema", json.dumps(schema))
    assert accepts(compiler, structured, text) == is_accepted


def test_branches_of_which_exactly_one_must_hold_are_not_narrowed():
    branch = {"type": "object", "properties": {"b": {"type": "integer"}}}
    schema = {"oneOf": [{**branch, "required": ["b"]}, branch]}
    assert trial.closed(schema) == schema
    assert trial.closed({"anyOf": [branch]}) != {"anyOf": [branch]}


EXPLOSIVE = {
    "remainders": {"type": "integer", "multipleOf": 10_000_019},
    "intersections": {
        "allOf": [
            {"type": "string", "pattern": f"(x|y)*x(x|y){{{size}}}$"} for size in range(10, 24)
        ]
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPLOSIVE)
def test_a_small_schema_that_explodes_is_refused_in_time(compiler, name, monkeypatch):
    monkeypatch.setattr(trial, "MAX_WALL_S", 1)
    with pytest.raises(RequestError, match="too much time"):
        compiler.compile(StructuredOutput("json_schema", json.dumps(EXPLOSIVE[name])))


# Every letter can be read in hundreds of ways, and a mask takes seconds.
AMBIGUOUS = "\n".join(
    ["start: " + " | ".join(f"r{i}" for i in range(400))]
    + [f'r{i}: "a" r{(i + 1) % 400} | "b" | start start' for i in range(400)]
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "text", [AMBIGUOUS, AMBIGUOUS.replace("start", "rest") + '\nstart: "[" rest "]"']
)
def test_an_ambiguous_grammar_is_refused_in_time(compiler, text, monkeypatch):
    monkeypatch.setattr(trial, "MAX_WALL_S", 2)
    with pytest.raises(RequestError, match="too much time"):
        compiler.compile(StructuredOutput("grammar", text))


@pytest.mark.slow
def test_the_process_of_an_explosion_ends_itself():
    """Its own limit, in time of the CPU, does not depend on how busy the machine is."""
    with pytest.raises(trial.GrammarError, match="time or memory"):
        trial.tried("json_schema", json.dumps(EXPLOSIVE["remainders"]), is_compact=True)


@pytest.mark.slow
def test_a_schema_that_is_too_large_is_refused(compiler):
    many = {f"p{i}": {"const": 1} for i in range(9000)}
    text = json.dumps({"type": "object", "properties": many})
    with pytest.raises(RequestError, match=r"too big|too much time"):
        compiler.compile(StructuredOutput("json_schema", text))


def test_the_latest_grammars_are_kept(compiler, monkeypatch):
    tries: list[str] = []

    def counted(kind, text, is_compact):
        tries.append(text)
        return compiler_module.LLMatcher.grammar_from_regex(text)

    monkeypatch.setattr(compiler_module, "tried", counted)
    first = compiler.compile(regex("a0"))
    assert compiler.compile(regex("a0")) is first
    assert tries == ["a0"]
    for number in range(1, MAX_CACHED):
        compiler.compile(regex(f"a{number}"))
    assert compiler.compile(regex("a0")) is first  # and is now the latest
    compiler.compile(regex("b"))
    assert compiler.compile(regex("a0")) is first
    compiler.compile(regex("a1"))
    assert tries.count("a1") == 2


def test_several_threads_may_compile_at_once():
    fresh = GrammarCompiler(tokenizer(), VOCAB_SIZE)
    made: list[object] = []
    threads = [
        threading.Thread(target=lambda: made.append(fresh.compile(StructuredOutput("json_object"))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 4


def test_a_tokenizer_that_no_grammar_can_follow_is_named():
    with pytest.raises(RequestError, match="this model's tokenizer") as caught:
        GrammarCompiler(word_tokenizer(), 61).compile(StructuredOutput("json_object"))
    assert caught.value.field == "structured"
