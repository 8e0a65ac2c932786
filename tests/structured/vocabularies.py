"""Vocabularies with which grammars can be followed, and grammars small enough to be listed."""

import re
from functools import cache
from itertools import product

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outdraft.core.sampling import StructuredOutput
from outdraft.structured.compiler import GrammarCompiler

TOKENS = ("a", "b", "c", "ab", "bc", "aab", "</s>")  # each is its place
END = 6
REGEXES = ("(ab|c)*", "a{2,5}b?", "(aab?){0,3}c+", "[abc]{1,4}", "c(a|bc)*c", "b?")


@cache
def tokenizer() -> Tokenizer:
    """TOKENS; it encodes letter by letter."""
    vocab = {token: place for place, token in enumerate(TOKENS)}
    result = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([TOKENS[END]])
    return result


def text_of(token_ids: list[int]) -> str:
    return "".join(TOKENS[token_id] for token_id in token_ids if token_id != END)


def regex(text: str) -> StructuredOutput:
    return StructuredOutput("regex", text)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), len(TOKENS))


# Whatever can become a text of one of REGEXES becomes one with at most three letters more.
ENDINGS = ["".join(word) for size in range(4) for word in product("abc", repeat=size)]


def allowed_by_search(pattern: str, output: list[int]) -> set[int]:
    """What may follow, as Python's own regular expressions see it."""
    text = text_of(output)
    found = {
        place
        for place, token in enumerate(TOKENS)
        if place != END and any(re.fullmatch(pattern, text + token + end) for end in ENDINGS)
    }
    return found | {END} if re.fullmatch(pattern, text) else found
