"""Compiles the output's form that a client asks for into a grammar that sequences can follow.

llguidance does the parsing. It takes a JSON schema, a regular expression, a grammar in Lark's or
GBNF's notation, or a choice of texts.
"""

import json
from contextlib import closing
from functools import cached_property, lru_cache

from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer

from outdraft.core.errors import RequestError
from outdraft.core.structured_outputs import StructuredOutput, Thoughts
from outdraft.structured.matcher import Grammar
from outdraft.structured.time_limit import TimeLimit
from outdraft.structured.trial import GrammarError, grammar_source, parser_limits, tried

MAX_CACHED = 32  # grammars; each may grow to 100 MB, but hardly any does
MAX_FIRST_MASK_S = 5.0
# One sequence may take this in one step, while all others wait. Most need less than 0.5 ms.
MAX_FOLLOWING_S = 0.5
_MAX_MESSAGE = 500  # characters; the library quotes whole lines of its input
_FORM = "form_behind_thoughts"
_END = "<|the output may end here|>"


class GrammarCompiler:
    """Compiles grammars for one vocabulary and keeps the latest. Safe to use from any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._following = TimeLimit(MAX_FOLLOWING_S)
        self._grammar = lru_cache(MAX_CACHED)(self._compiled)

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Return the grammar: at once if it is among the latest, else after 0.1 s to a few seconds.

        Raises:
            RequestError: it is wrong, too large, or takes too long; or no grammar can be followed
                with the model's tokenizer. The field is "structured".
        """
        try:
            grammar = self._grammar(structured)
        except GrammarError as error:
            kind = structured.kind.replace("_", " ")
            message = f"the {kind} cannot be used: {str(error)[:_MAX_MESSAGE]}"
            raise RequestError(message, "structured") from error
        if grammar.failure is not None:
            raise RequestError(grammar.failure, "structured")
        return grammar

    def _compiled(self, structured: StructuredOutput) -> Grammar:
        if structured.kind == "json_object":
            source = grammar_source("json_object", "", structured.disable_any_whitespace)
        else:
            source = tried(structured.kind, structured.text, structured.disable_any_whitespace)
        if structured.behind is not None:
            source = behind_thoughts(source, structured.behind)
        tokenizer, end_id = self._tokenizer_and_end
        limits = parser_limits()

        def compile_state() -> LLMatcher:
            return LLMatcher(tokenizer, source, log_level=0, limits=limits)

        grammar = Grammar(compile_state, end_id, self._following)
        if grammar.start.is_error():
            raise GrammarError(grammar.start.get_error())
        first = grammar.start.deep_copy()
        try:
            with closing(TimeLimit(MAX_FIRST_MASK_S)) as limit:
                limit.run(first.compute_bitmask)
        except TimeoutError:
            raise GrammarError("it takes too much time to find how an output begins") from None
        if first.is_error():
            raise GrammarError("no output follows it")
        return grammar

    @cached_property
    def _tokenizer_and_end(self) -> tuple[LLTokenizer, int]:
        """The library's tokenizer, and its token that stands for the output's end.

        It is none of the model's tokens: which of those end an output depends on the request.
        """
        own = Tokenizer.from_str(self._tokenizer.to_str())
        own.add_special_tokens([_END])
        end_id = own.get_vocab()[_END]
        size = max(self._vocab_size, end_id + 1)
        try:
            return LLTokenizer(own.to_str(), n_vocab=size, eos_token=end_id), end_id
        except ValueError as error:
            raise RequestError(
                f"structured output does not work with this model's tokenizer: {error}",
                "structured",
            ) from error


def behind_thoughts(source: str, thoughts: Thoughts) -> str:
    """The grammar of thoughts and what follows them; `source` is llguidance's, as JSON or Lark.

    The thoughts are a part of the grammar that takes any text up to the first end mark. So masks of
    drafts that reach from the thoughts into the form are right without special cases.
    """
    rest = f"rest[suffix={json.dumps(thoughts.end)}]: /(?s:.*)/"
    if thoughts.start is None:
        head = f"start: rest @{_FORM}\n{rest}"
    else:
        head = f"start: thoughts? @{_FORM}\nthoughts: {json.dumps(thoughts.start)} rest\n{rest}"
    is_lark = not source.startswith("{")
    first, *others = [{"lark_grammar": source}] if is_lark else json.loads(source)["grammars"]
    grammars = [{"lark_grammar": head}, first | {"name": _FORM}, *others]
    return json.dumps({"grammars": grammars})
