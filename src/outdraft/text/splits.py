"""Rules that split a text before byte-level BPE, by the names that GGUF files have for them.

The names, and the expressions that llama.cpp takes for them, are those of its llama-vocab.cpp. One
expression cuts a text into its matches and the text between them; the next one cuts those pieces.
"""

# ruff: noqa: RUF001  # letters of many scripts look alike

from dataclasses import dataclass

_CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_BLANKS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA_3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|{_BLANKS}"
_QWEN_2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}"
# Words that begin with large letters and go on with small ones; only in ASCII do the two differ.
_LARGE, _SMALL = r"(?:(?=\p{L})[^a-z])", r"(?:(?=\p{L})[^A-Z])"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}*{_SMALL}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_LARGE}+{_SMALL}*"
_SIGNS_OR_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_ASCII_SIGNS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_CJK = r"(?:(?!\s)[一-龥ࠀ-一가-퟿])+"
# Letters of scripts with two cases; those that Unicode writes in two ways are escaped.
_CASED_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯ"
    "ꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)


@dataclass(frozen=True, slots=True)
class TextSplit:
    """The rule of one name.

    Attributes:
        expressions: in Oniguruma's syntax, applied one after the other.
        takes_whole_words: a piece that is a token is taken before any merge.
        adds_bos: a text begins with the BOS token, unless the file says else.
    """

    expressions: tuple[str, ...]
    takes_whole_words: bool = False
    adds_bos: bool = False


_NOT_PUNCTUATED = r" ?[^(\s|.,!?…。，、।۔،)]+"

# By the names of each rule.
_RULES = {
    "default": TextSplit((r"[\p{P}\$\+<=>\^~\|]+", _GPT_2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": TextSplit(
        (_LLAMA_3,), takes_whole_words=True, adds_bos=True
    ),
    "dbrx smaug-bpe glm4 chatglm-bpe": TextSplit((_LLAMA_3,)),
    "deepseek-llm": TextSplit(
        (
            r"[\r\n]",
            rf"\s?[{_CASED_LETTERS}]+",
            r"\s?[!-/:-~！-／：-～‘-‟、-。]+",
            r"\s+$",
            _CJK,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": TextSplit((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": TextSplit(
        (
            r"\p{N}{1,3}",
            "[一-龥぀-ゟ゠-ヿ]+",
            rf"{_ASCII_SIGNS}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
            rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_BLANKS}",
        )
    ),
    "falcon": TextSplit((r"[\p{P}\$\+<=>\^~\|`]+", _GPT_2, "[0-9][0-9][0-9]")),
    "starcoder refact command-r smollm codeshell exaone minerva-7b mellum2": TextSplit(
        (r"\p{N}", _GPT_2)
    ),
    "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling": TextSplit(
        (_GPT_2,)
    ),
    "stablelm2 qwen2 deepseek-r1-qwen kormo megrez hunyuan grok-2 solar-open f2llmv2": TextSplit(
        (_QWEN_2,)
    ),
    "qwen35": TextSplit(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
            rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_BLANKS}",
        )
    ),
    "tekken": TextSplit(
        ("|".join([*_CASED, r"\p{N}", _SIGNS_OR_PATHS, _BLANKS]),),
        takes_whole_words=True,
        adds_bos=True,
    ),
    "gpt-4o llama4 kanana2 minimax-m2 talkie": TextSplit(
        (
            "|".join(
                [
                    *(rf"{cased}{_CONTRACTIONS}?" for cased in _CASED),
                    *(r"\p{N}{1,3}", _SIGNS_OR_PATHS, _BLANKS),
                ]
            ),
        )
    ),
    "bailingmoe bailingmoe2 llada-moe": TextSplit(
        (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_SIGNS}|\s*[\r\n]|\s+(?!\S)|\s+",)
    ),
    "seed-coder": TextSplit(
        (rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_BLANKS}",)
    ),
    "minicpm5": TextSplit(
        (r"\p{N}{1,3}", rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_SIGNS}|{_BLANKS}"),
        takes_whole_words=True,
    ),
    "exaone-moe": TextSplit(
        (
            rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+"
            r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "jais-2": TextSplit(
        (
            rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_SIGNS}|\s*[\r\n]+|"
            + "|".join(rf"\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
            + r"|\s{1,2}(?!\S)|\s{1}",
        )
    ),
    "ufakzeka": TextSplit((rf"{_WORD}|\p{{N}}|{_SIGNS}|{_BLANKS}",)),
    "laguna": TextSplit((r"[^\n]+|[\n]+", _QWEN_2)),
    "viking": TextSplit((_NOT_PUNCTUATED, r"\p{N}")),
    "poro-chat bloom gpt3-finnish": TextSplit((_NOT_PUNCTUATED,)),
    "chameleon": TextSplit(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT_2,
        ),
        adds_bos=True,
    ),
}

SPLITS = {name: rule for names, rule in _RULES.items() for name in names.split()}
