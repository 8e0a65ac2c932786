"""What is measured: which model, method and batches, with which prompts, in which order."""

import random
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from outdraft import assets

ENGINES = ("outdraft", "llama.cpp", "openvino", "vllm", "transformers")
OURS, TWO, FAST = ENGINES[:1], ENGINES[:2], ENGINES[:4]
OWN_METHODS = ("suffix", "combined", "eagle3", "medusa", "mlp_speculator")  # heads are small's


@dataclass(frozen=True)
class Group:
    """Cells of one runner for each engine: what they load, then what they run."""

    model: str
    method: str = "plain"
    engines: tuple[str, ...] = ENGINES
    batches: tuple[int, ...] = (1, 8, 16)  # requests that begin at once
    depth: int = 4
    kind: str = "decode"  # or "first token", "busy", "quantised"
    prompt_lengths: tuple[int, ...] = (128,)
    num_prompts: int = 5  # that a batch of one goes through, in every repeat
    max_tokens: int = 128
    busy: tuple[int, ...] = (0,)  # other processes that compute all the time
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # for runners, by engine
    variants: dict[str, str] = field(default_factory=dict)  # ends of the target's name, by engine

    @property
    def max_length(self) -> int:
        """Tokens of the longest request and its last drafts, in whole blocks."""
        return (max(self.prompt_lengths) + self.max_tokens + 16 + 63) // 64 * 64


def quick() -> list[Group]:
    """The cells that matter most, in some ten minutes."""
    return [
        Group("big", engines=FAST, batches=(1, 8), num_prompts=2),
        Group("big", "draft_model", FAST, (1, 8), num_prompts=2),
        Group("small", engines=FAST, batches=(1, 8)),
        Group("small", "draft_model", FAST, (1, 8)),
        Group("small", "ngram", FAST, (1,)),
        Group("small", "suffix", OURS, (1, 8)),
        first_tokens(128, 512),
    ]


def whole() -> list[Group]:
    """All cells; depths other than 4 only to find each engine's best one."""
    groups: list[Group] = []
    for model in ("big", "small"):
        groups += [Group(model), Group(model, "draft_model"), Group(model, "ngram")]
        groups += [Group(model, "draft_model", ENGINES, (1,), n) for n in (2, 3, 5, 6, 7, 8)]
        methods = OWN_METHODS if model == "small" else OWN_METHODS[:2]
        groups += [Group(model, method, OURS) for method in methods]
        groups.append(Group(model, "plain", TWO, (1,), kind="busy", busy=(0, 1, 2)))
    for ours, theirs in (("int8", "-q8_0"), ("int4", "-q4_0")):
        bits = {"outdraft": {"quantization": ours}}
        file = {"llama.cpp": theirs}
        groups.append(Group("big", "plain", TWO, kind="quantised", options=bits, variants=file))
    return [*groups, first_tokens(128, 512, 2048)]


def first_tokens(*lengths: int) -> Group:
    """How long prompts take."""
    return Group("big", "plain", FAST, (1,), 0, "first token", lengths, num_prompts=3, max_tokens=1)


def prompts(model: str, length: int, count: int) -> list[list[int]]:
    """Different prompts of as many tokens: held-out code for the trained model, else noise."""
    if model == "big":
        drawn = random.Random(length)
        return [[drawn.randrange(2, 8192) for _ in range(length)] for _ in range(count)]
    tokenizer = Tokenizer.from_file(str(assets.target_path() / "tokenizer.json"))
    texts = [tokenizer.encode(entry.text).ids for entry in assets.prompts()]
    long_enough = [ids[:length] for ids in texts if len(ids) >= length]
    assert len(long_enough) >= count
    return long_enough[:count]
