"""Tries a client's grammar in a process of its own first, which is ended when it takes too much.

Most grammars compile in milliseconds, but some small ones take minutes or gigabytes, and nothing
can stop the library in the middle. This file is also the program that runs there.
"""

import json
import resource
import subprocess
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import llguidance
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

if TYPE_CHECKING:  # the program knows nothing of the package: it starts faster
    from llguidance._lib import JsonCompileOptions

    from outdraft.core.structured_outputs import StructuredKind

MAX_CPU_S = 2
MAX_WALL_S = 15  # on a machine that is busy with other things
MAX_BYTES = 2**30
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
    """The grammar as the library takes it, after it was seen to compile within the limits.

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
        raise GrammarError("it takes too much time or memory to compile")
    return output


def grammar_source(kind: "StructuredKind", text: str, is_compact: bool) -> str:
    """The grammar as the library takes it. `is_compact`: JSON has no white space.

    Raises:
        ValueError: it is wrong; some errors show only when the grammar is compiled.
    """
    if kind == "json_object":
        text = '{"type": "object"}'
    if not kind.startswith("json"):
        notation = "choice" if kind == "choice" else "regex" if kind == "regex" else "grammar"
        return llguidance.grammar_from(notation, text)
    with suppress(RecursionError):  # the library says the same in better words
        schema = json.loads(text)
        if not isinstance(schema, dict) and schema is not True:
            return llguidance.grammar_from("json_schema", text)  # it says what is wrong
    return LLMatcher.grammar_from_json_schema(
        "{}" if text.strip() == "true" else text,
        overrides=_COMPACT if is_compact else _FLEXIBLE,
    )


def parser_limits() -> LLParserLimits:
    """Bounds of a grammar, and of following it for one token, which takes some 20 ms at most."""
    return LLParserLimits(
        max_items_in_row=2_000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=200_000,
        step_max_items=50_000,
        max_lexer_states=50_000,  # of 2 kB
        max_grammar_size=50_000,
        verbose_errors=False,  # they would quote the output of whoever uses the grammar
    )


def _main() -> None:
    """Print the grammar, or why it is refused. Arguments: the kind, and how JSON is spaced."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    kind, whitespace = sys.argv[1:]
    text = sys.stdin.buffer.read().decode()
    try:
        is_compact = whitespace == "compact"
        source = grammar_source(kind, text, is_compact)  # pyright: ignore[reportArgumentType]
    except ValueError as error:
        sys.stdout.write(str(error))
        sys.exit(_REFUSED)
    # Bytes are as hard to follow as any vocabulary. What they do not have, special tokens, is
    # no reason to refuse a grammar here: it is compiled for the model's vocabulary next.
    LLMatcher(LLTokenizer("byte"), source, log_level=0, limits=parser_limits())
    sys.stdout.write(source)


if __name__ == "__main__":
    _main()
