"""Tries a client's grammar in a process of its own first, which is ended when it takes too much.

Most grammars compile in milliseconds, but some small ones take minutes or gigabytes, and nothing
can stop the library in the middle. This file is also the program that runs there.
"""

import json
import random
import resource
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

if TYPE_CHECKING:  # the program does not import the package: it starts faster
    from llguidance._lib import JsonCompileOptions

    from outdraft.core.structured_outputs import StructuredKind

MAX_CPU_S = 2
MAX_WALL_S = 15  # on a machine that is busy with other things
MAX_BYTES = 2**30
_WALK_BYTES = 60
_MAX_BYTE_CPU_S = 0.25  # to follow the grammar by one byte; others take some 20 ms at most
_REFUSED = 3  # exit status; the reason is the output
# Without a bound a model may write white space until its tokens are used up.
_COMPACT: "JsonCompileOptions" = {"whitespace_flexible": False}
_FLEXIBLE: "JsonCompileOptions" = {
    "whitespace_flexible": True,
    "whitespace_pattern": r" |\n {0,20}|\n\t{0,8}",
}


class GrammarError(ValueError):
    """A grammar that cannot be used, and why."""


def tried(kind: "StructuredKind", text: str, is_compact: bool) -> str:
    """Return the grammar as the library takes it, once it has compiled within the limits.

    Raises:
        GrammarError: it did not.
    """
    try:
        finished = subprocess.run(
            [sys.executable, "-P", __file__, kind, "compact" if is_compact else "flexible"],
            input=text.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=MAX_WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise GrammarError("it takes too much time to compile") from None
    output = finished.stdout.decode(errors="replace")
    if finished.returncode == _REFUSED:
        raise GrammarError(output)
    if finished.returncode != 0:
        raise GrammarError("it takes too much time or memory to compile or to follow")
    return output


def grammar_source(kind: "StructuredKind", text: str, is_compact: bool) -> str:
    """Return the grammar as the library takes it. `is_compact`: JSON has no white space.

    Raises:
        ValueError: it is wrong; some errors show only when the grammar is compiled.
    """
    if kind in ("choice", "regex", "grammar"):
        return llguidance.grammar_from(kind, text)
    if kind == "json_object":
        text = '{"type": "object"}'
    with suppress(RecursionError):  # the library says the same in better words
        schema = json.loads(text)
        if not isinstance(schema, dict) and schema is not True:
            return llguidance.grammar_from("json_schema", text)  # raises with the reason
        text = "{}" if schema is True else json.dumps(closed(schema))
    overrides = _COMPACT if is_compact else _FLEXIBLE
    return LLMatcher.grammar_from_json_schema(text, overrides=overrides)


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """Close the schema's objects to properties that it does not name: else a model may add some
    until its tokens are used up. An output that follows it follows the client's own schema too.

    An object with a rule for its further properties keeps it. A schema whose parts describe one
    object is left as it is: there each part may hold properties that another one names.
    """
    return _closed(schema) if _is_of_separate_objects(schema) else schema


_OF_OBJECTS = {"properties", "required", "additionalProperties", "patternProperties"}
_COMBINING = {"$ref", "allOf", "anyOf", "oneOf", "not", "if", "$dynamicRef", "dependentSchemas"}


def _is_of_separate_objects(value: object) -> bool:
    if isinstance(value, list):
        return all(map(_is_of_separate_objects, value))
    if not isinstance(value, dict):
        return True
    combining = _COMBINING & value.keys()
    parts = value.get("allOf")
    if (combining and _OF_OBJECTS & value.keys()) or len(combining) > 1:
        return False
    # Less in one part lets these accept more.
    if combining & {"not", "if", "dependentSchemas", "oneOf"} or (
        parts is not None and not (isinstance(parts, list) and len(parts) == 1)
    ):
        return False
    return all(map(_is_of_separate_objects, value.values()))


def _closed(value: Any, *, is_schema: bool = True) -> Any:
    """`is_schema`: it is no mapping of names to schemas."""
    if isinstance(value, list):
        return [_closed(item) for item in value]
    if not isinstance(value, dict):
        return value
    result: dict[str, Any] = {}
    for name, item in value.items():
        if is_schema and name in ("const", "enum", "default", "examples"):
            result[name] = item  # values, not schemas
        else:
            holds_names = is_schema and name in ("properties", "$defs", "definitions")
            result[name] = _closed(item, is_schema=not holds_names)
    if is_schema and _may_be_closed(value):
        result["additionalProperties"] = False
    return result


def _may_be_closed(schema: dict[str, Any]) -> bool:
    says_more = {"additionalProperties", "patternProperties", "unevaluatedProperties"} & set(schema)
    properties, required = schema.get("properties"), schema.get("required", [])
    if says_more or not isinstance(properties, dict) or not isinstance(required, list):
        return False
    return all(name in properties for name in required if isinstance(name, str))


def parser_limits() -> LLParserLimits:
    """Bounds of a grammar, and of following it for one token, which takes some 20 ms at most."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,  # of 2 kB
        max_grammar_size=50_000,
        verbose_errors=False,  # they would quote the outputs of others that use the grammar
    )


def _walk(matcher: LLMatcher) -> None:
    """Write a text at random: a grammar that takes long to follow mostly shows it soon.

    Raises:
        GrammarError: it does.
    """
    choose = random.Random(0)
    for _ in range(_WALK_BYTES):
        started_s = time.process_time()
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        bytes_ = [byte for byte in range(256) if allowed >> byte & 1]
        goes_on = not matcher.is_error() and bytes_ and matcher.consume_token(choose.choice(bytes_))
        if time.process_time() - started_s > _MAX_BYTE_CPU_S:
            raise GrammarError("it takes too much time to follow")
        if not goes_on:
            return  # compiling it for the vocabulary finds out why


def _main() -> None:
    """Print the grammar, or why it is refused. Arguments: the kind, and how JSON is spaced."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    kind, whitespace = sys.argv[1:]
    text = sys.stdin.buffer.read().decode()
    try:
        is_compact = whitespace == "compact"
        source = grammar_source(kind, text, is_compact)  # pyright: ignore[reportArgumentType]
        # Bytes are as hard to follow as any vocabulary. What they do not have, special tokens, is
        # no reason to refuse a grammar here: it is compiled for the model's vocabulary next.
        _walk(LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=parser_limits()))
    except ValueError as error:
        sys.stdout.write(str(error))
        sys.exit(_REFUSED)
    sys.stdout.write(source)


if __name__ == "__main__":
    _main()
