"""What is measured: which models and methods, and what is asked of the engines that load them."""

import random
from dataclasses import dataclass, field, replace
from typing import Any

from tokenizers import Tokenizer

from outdraft import assets

OURS, *_ = ENGINES = ("outdraft", "llama.cpp", "openvino", "vllm", "transformers")
FAST = ENGINES[:4]
OWN = ("combined", "eagle3", "medusa", "mlp_speculator", "dspark")  # methods of the embedded model
PLAIN = "plain"
BLOCK = 64  # requests' lengths are whole blocks of as many tokens


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What each engine is asked, again in every repeat.

    A batch of one goes through its prompts one after the other; a larger one begins them at once.
    """

    batch: int = 1
    depth: int = 0  # drafts a step
    num_prompts: int = 2  # of a batch of one
    prompt_tokens: int = 128
    new_tokens: int = 128
    repeats: int = 3
    busy: int = 0  # other processes that compute all the time

    @property
    def name(self) -> str:
        parts = {"batch": self.batch, "depth": self.depth, "after": self.prompt_tokens}
        return ", ".join(f"{word} {n}" for word, n in {**parts, "beside": self.busy}.items())

    def batches(self, prompts: list[list[int]]) -> list[list[list[int]]]:
        return [[one] for one in prompts] if self.batch == 1 else [prompts]

    def num_repeats(self, engine: str) -> int:
        return 1 if engine == "transformers" else self.repeats  # it is slow

    def num_runs(self, engine: str) -> int:
        """How many batches a whole measurement of an engine has."""
        return self.num_repeats(engine) * (self.num_prompts if self.batch == 1 else 1)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Cells that each engine goes through in one process, with what it loads for them."""

    model: str
    method: str = PLAIN
    what: str = ""  # is measured, if it is not decoding: "first token", "busy", "int8", "int4"
    engines: tuple[str, ...] = FAST
    cells: tuple[Cell, ...]
    options: dict[str, dict[str, Any]] = field(default_factory=dict)  # for runners, by engine
    endings: dict[str, str] = field(default_factory=dict)  # of the target's name, by engine

    @property
    def name(self) -> str:
        return f"{self.model} {self.what or self.method}"

    def cells_of(self, engine: str) -> list[Cell]:
        """Those that it can do: transformers drafts for one request only."""
        is_alone = engine == "transformers" and self.method != PLAIN
        return [cell for cell in self.cells if cell.batch == 1 or not is_alone]

    @property
    def max_length(self) -> int:
        """Tokens of the longest request and its last drafts."""
        longest = max(cell.prompt_tokens + cell.new_tokens for cell in self.cells)
        return (longest + 16 + BLOCK - 1) // BLOCK * BLOCK


def whole() -> list[Group]:
    """Every case, in some 45 minutes: each engine's best of depths 2 to 8, three repeats."""
    deep = range(2, 9)
    big = (1, 8, 16)
    one = Cell(num_prompts=5)
    small = (one, Cell(batch=8), Cell(batch=16))
    small_drafts = (*over(one, deep), *over(small[1], (2, 4, 8)), *over(small[2], (2, 4)))
    big_drafts = (
        *over(Cell(), deep),
        *over(Cell(batch=8), (2, 4, 8)),
        *over(Cell(batch=16, repeats=2), (2, 4)),
    )
    beside = Cell(num_prompts=1, new_tokens=192)
    return [
        Group(model="big", engines=ENGINES, cells=tuple(Cell(batch=n) for n in big)),
        Group(model="big", method="draft_model", engines=ENGINES, cells=big_drafts),
        Group(model="small", engines=ENGINES, cells=small),
        Group(
            model="small",
            method="draft_model",
            engines=ENGINES,
            cells=small_drafts,
            # With noise for weights, in `big`, no draft is sure and this makes it slower.
            options={"llama.cpp": {"--spec-draft-p-min": 0.5}},
        ),
        Group(
            model="small",
            method="ngram",
            engines=ENGINES,
            cells=(*over(one, (2, 4, 6, 8)), *over(small[1], (2, 4, 8)), *over(small[2], (2, 4))),
        ),
        Group(model="small", method="suffix", engines=(OURS,), cells=small),
        first_tokens(128, 512, 2048),
        Group(
            model="big",
            what="busy",
            engines=(OURS, "llama.cpp"),
            cells=tuple(replace(beside, busy=busy) for busy in (0, 1, 2)),
        ),
        quantised("int8", "int8", "-q8_0"),
        quantised("int4", "int4-g32", "-q4_0"),
        *(Group(model="small", method=m, engines=(OURS,), cells=over(one, (4,))) for m in OWN),
    ]


def quick() -> list[Group]:
    """The cases that matter most, once each, in some ten minutes."""
    one, eight = Cell(repeats=1), Cell(batch=8, repeats=1)
    four = replace(one, depth=4)
    groups = [
        Group(model=model, method=method, cells=(replace(one, depth=n), replace(eight, depth=n)))
        for model in ("big", "small")
        for method, n in ((PLAIN, 0), ("draft_model", 4))
    ]
    groups.append(Group(model="small", method="ngram", cells=(four,)))
    groups.append(Group(model="small", method="suffix", engines=(OURS,), cells=(one, eight)))
    tokens = first_tokens(128, 512)
    once = tuple(replace(cell, repeats=1) for cell in tokens.cells)
    return [*groups, replace(tokens, cells=once)]


def over(cell: Cell, depths: tuple[int, ...] | range) -> tuple[Cell, ...]:
    return tuple(replace(cell, depth=depth) for depth in depths)


def first_tokens(*lengths: int) -> Group:
    cells = tuple(Cell(prompt_tokens=n, new_tokens=1) for n in lengths)
    return Group(model="big", what="first token", engines=ENGINES, cells=cells)


def quantised(bits: str, ours: str, gguf: str) -> Group:
    return Group(
        model="big",
        what=bits,
        engines=(OURS, "llama.cpp", "openvino"),
        cells=(Cell(), Cell(batch=8)),
        options={OURS: {"quantization": ours}},
        endings={"llama.cpp": gguf, "openvino": f"-{bits}"},
    )


def prompts(model: str, length: int, count: int) -> list[list[int]]:
    """Different prompts of as many tokens: held-out code for the trained model, else noise."""
    if model == "big":
        drawn = random.Random(length)
        return [[drawn.randrange(2, 8192) for _ in range(length)] for _ in range(count)]
    tokenizer = Tokenizer.from_file(str(assets.target_path() / "tokenizer.json"))
    texts = [tokenizer.encode(text).ids for _, text in assets.prompts()]
    long_enough = [ids[:length] for ids in texts if len(ids) >= length]
    assert len(long_enough) >= count
    return long_enough[:count]
