"""Texts that tokenizers fail on: a fixed list, and texts drawn with a seed."""

# ruff: noqa: RUF001  # letters of many scripts look alike

import random
import re
from collections.abc import Sequence

FIXED = [
    *("", " ", "  ", "\n", "\t", "\r\n", "\n\n\n\n \n", " " * 40, "\n" * 40, "\t" * 9, "a" * 300),
    "Hello, world! It's 12:30; we'll see — won't we?",
    "I'M HE'S they'RE You'Ve i'll X'D 'tis ''s s' 'S",
    *("3.14159", "1234567890", "1,000,000", "٣٤٥٦", "१२३", "Ⅷ ½ ²³", "2024-02-29T12:00:00Z"),
    "def f(x):\n    return x  # ¿qué?\n\n\tif x:\n\t\tpass\n",
    '#include <stdio.h>\r\nint main(void) { printf("%d\\n", 0x7f); return 0; }\r\n',
    '{"name": "a", "arguments": {"b": [1, 2.5e-3, null]}}',
    "https://example.org/a/b?c=d&e=f#g /usr/bin/env C:\\Users\\x",
    "żółć Grüße naïve Ærøskøbing İstanbul ǅ ŉ ſ",
    "Привет, мир! Ёлка. Ґ",
    "Γειά σου Κόσμε, ἀρχή",
    "שָׁלוֹם עולם",
    "مرحبا بالعالم ﷽",
    "नमस्ते दुनिया क्षत्रिय",
    "สวัสดีชาวโลก",
    "こんにちは、世界。ｶﾀｶﾅ",
    "你好，世界！㐀𠀀",
    "안녕하세요 세계 ㄱㄴ 각",
    "გამარჯობა Ꭰ ⴰ አማርኛ ᠮᠣᠩ",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇵🇱🇯🇵 ❤️ 1️⃣ 😀😀",
    "e\u0301 \u0301 a\u0300\u0301\u0302 Z͑ͫ̓ͪ̂ͫ̽͏̴̙",
    "\x00\x01\x07\x08\x0b\x0c\x1b[0m\x1f\x7f\x85",
    "\ufeff\u200b\u200c\u200d\u2060\u00ad\ufffd\ufffd\ufffe",
    "a\u00a0b\u2003c\u2028d\u3000e\u202ff\u1680g",
    "▁▁ ▁a ▁ Ġ Ċ <0x0A> <0xE6> [PAD151935] [UNK]",
    "𝒳𝓎 𝟘𝟙 ⅓ ← ≠ ∑ € ₿ ™ ° ¶ … “q” ‘q’ „q“ «q»",
    "<b>bold</b> <s>gone</s> <h1>x</h1><table>\n</table></s><s>",
    "a  b   c    d     e\n f\n  g \n h  \n",
    *("''", '"', "\\", "...", "!!!", "?!?!", "-----", "=====", "*****", "$1$", "^_^", "`x`", "|~|"),
]
_SCRIPTS = [
    *((0x20, 0x7E), (0xA0, 0x24F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x531, 0x586)),
    *((0x5D0, 0x5EA), (0x621, 0x669), (0x905, 0x96F), (0xE01, 0xE5B), (0x10D0, 0x10F0)),
    *((0x1100, 0x11FF), (0x1200, 0x1248), (0x1E00, 0x1EFF), (0x2000, 0x206F), (0x20A0, 0x20B9)),
    *((0x2100, 0x21FF), (0x2200, 0x22FF), (0x2500, 0x257F), (0x2600, 0x26FF), (0x3000, 0x303F)),
    *((0x3041, 0x3096), (0x30A1, 0x30FA), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0xFF01, 0xFFEE)),
    *((0x1D400, 0x1D433), (0x1F300, 0x1F5FF), (0x1F600, 0x1F64F), (0x20000, 0x20100)),
]
_JOINED = ["\u200d", "\ufe0f", "\u20e3", "\U0001f3fd", "\u0301", "\u200c", "\U0001f1f5", "\u202e"]
_WORDS = re.findall(
    r"\S+",
    "the of and to in is you that it he was for on are as with his they I at be this have "
    "from or return import class function const while None true self print Straße café naïve "
    "don't we'll THE Hello HTTP camelCase snake_case CONSTANT_NAME x1 i18n 42nd ",
)
_BLANKS = [
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\t",
    "\r\n",
    " \n",
    "\n ",
    "    ",
    "\t\t",
    "\u00a0",
    " \t",
]
_SIGNS = [*"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~", "--", "->", "==", "...", "//", "/*", "<|", "|>"]


def texts(seed: int, count: int, special: Sequence[str] = ()) -> list[str]:
    """The fixed texts, and drawn ones up to the count.

    Args:
        special: tokens that are written out in some texts, as they are and with a character less.
    """
    rng = random.Random(seed)
    drawn = [_drawn(rng, special) for _ in range(count - len(FIXED))]
    return [*FIXED, *drawn]


def _drawn(rng: random.Random, special: Sequence[str]) -> str:
    parts = [_part(rng, special) for _ in range(rng.randint(1, 12))]
    text = "".join(parts)
    if rng.random() < 0.1:  # bytes that no character has, often within one
        damaged = bytearray(text.encode())
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = 0xFF
        text = damaged.decode(errors="replace")
    return text


def _part(rng: random.Random, special: Sequence[str]) -> str:
    kind = rng.randrange(9 if special else 8)
    if kind == 0:
        return rng.choice(_WORDS)
    if kind == 1:
        return " " + rng.choice(_WORDS)
    if kind == 2:
        return rng.choice(_BLANKS) * rng.choice([1, 1, 1, 2, 7])
    if kind == 3:
        return "".join(rng.choice(_SIGNS) for _ in range(rng.randint(1, 4)))
    if kind == 4:
        return str(rng.randrange(10 ** rng.randint(1, 12)))
    if kind == 5:
        first, last = rng.choice(_SCRIPTS)
        return "".join(chr(rng.randint(first, last)) for _ in range(rng.randint(1, 8)))
    if kind == 6:
        return chr(rng.randint(0x1F300, 0x1F64F)) + rng.choice(_JOINED)
    if kind == 7:
        return chr(rng.choice([*range(32), 127, *range(0x80, 0xA0), 0xFEFF, 0xFFFD, 0x10FFFF]))
    token = rng.choice(special)
    return token if rng.random() < 0.7 else token[:-1]
