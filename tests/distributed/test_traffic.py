"""What the ranks of an engine send, counted from the plans of its steps: nothing else may cross."""

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import pytest

from outdraft.core.draft import TreeShape
from outdraft.core.plan import StepPlan, Work
from outdraft.core.sampling import SamplingParams
from outdraft.distributed.group import RankGroup
from outdraft.engine.llm import LLM
from outdraft.loading.models import LoadedModels
from outdraft.models.decoder.config import ModelConfig
from outdraft.runner.model_runner import LaunchedStep
from outdraft.runner.results import PendingStep
from tests.oracle.engines import checkpoint, config, pair, prompts_of, run, speculation
from tests.ranks import Spread, spread_models

NUM_DRAFTS = 3
INTEGER = 8  # bytes; pairs of a best token and its logit have two such numbers
FLOATS = {"float64": 8, "float32": 4}
Sent = tuple[dict[str, int], dict[str, int]]  # calls and bytes by operation


class Recorded(Spread):
    """Keeps all plans."""

    def __init__(self, llm: LLM, models: Sequence[LoadedModels]) -> None:
        self.plans: list[StepPlan] = []
        super().__init__(llm, models)

    def launch(self, plan: StepPlan) -> PendingStep | LaunchedStep:
        self.plans.append(plan)
        return super().launch(plan)


class Network(Protocol):
    """A model's, or a drafter's."""

    @property
    def num_layers(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...


@dataclass(frozen=True)
class Drafter:
    """A network, or heads, over the ranks of a draft group.

    Attributes:
        num_layers: 0: heads, each with a product of its own over the vocabulary.
        token_shift: rows that it reads less than a text has tokens.
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    token_shift: int = 0

    @classmethod
    def of(cls, family: str, method: str, target: ModelConfig) -> "Drafter":
        sizes = target.hidden_size, target.vocab_size
        if method == "medusa":
            return cls(0, *sizes)
        if method == "eagle3":  # one layer, and a vocabulary of its own
            raw = json.loads((checkpoint(family, "eagle3") / "config.json").read_text())
            return cls(1, target.hidden_size, raw["draft_vocab_size"], token_shift=1)
        drafter = ModelConfig.from_directory(pair(family).drafter)
        return cls(drafter.num_layers, drafter.hidden_size, drafter.vocab_size)


class Expected:
    """What one rank sends in a group."""

    def __init__(self, size: int, dtype: str) -> None:
        self.size, self.number, self.is_compiled = size, FLOATS[dtype], dtype == "float32"
        self.calls, self.sent = Counter[str](), Counter[str]()

    def add(self, operation: str, numbers: int) -> None:
        """`numbers`: integers that each rank gets of this one."""
        if self.size > 1:
            self.calls[operation] += 1
            self.sent[operation] += (self.size - 1) * numbers * INTEGER

    def add_turn(self, num_rows: int, width: int) -> None:
        """`num_rows`: of other ranks."""
        if self.size > 1:
            self.calls["turn"] += 1
            self.sent["turn"] += num_rows * width * self.number

    def add_pass(self, network: Network, num_rows: int, num_ends: int) -> None:
        """The embedding, and two products of each layer. A compiled pass goes on in its last layer
        with those rows only whose logits are needed, `num_ends`."""
        if self.size > 1:
            calls = 1 + 2 * network.num_layers
            rows = calls * num_rows - (2 * (num_rows - num_ends) if self.is_compiled else 0)
            self.calls["sum"] += calls
            self.sent["sum"] += (self.size - 1) * rows * network.hidden_size * self.number


def split(works: Sequence[Work], size: int, draft_size: int) -> list[list[Work]]:
    """The works that each rank verifies."""
    parts: list[list[Work]] = []
    for group in range(size // draft_size):
        own = [work for work in works if work.owner == group]
        cuts = [len(own) * member // draft_size for member in range(draft_size + 1)]
        parts += [own[cuts[member] : cuts[member + 1]] for member in range(draft_size)]
    return parts


@dataclass(frozen=True)
class Case:
    family: str
    method: str
    dtype: str
    size: int
    draft_size: int
    draws: bool

    def expected(self, plans: list[StepPlan], rank: int) -> tuple[Expected, Expected]:
        """For the groups of target and drafter."""
        size, draft_size = self.size, self.draft_size
        target = ModelConfig.from_directory(pair(self.family).target)
        drafter = Drafter.of(self.family, self.method, target)
        of_target, of_draft = (Expected(number, self.dtype) for number in (size, draft_size))
        columns = -(-target.vocab_size // size)
        first = rank - rank % draft_size
        for plan in plans:
            works = [work for work in plan.works if work.samples]
            rows = sum(1 + work.num_drafts for work in works)
            of_target.add_pass(target, plan.num_rows, rows)
            parts = split(works, size, draft_size)
            drafted = [[work for work in part if work.drafts is not None] for part in parts]
            if any(drafted):
                depth = max(work.num_drafts for work in itertools.chain(*drafted))
                of_target.add("join_rows", max(map(len, drafted)) * (2 * depth + 1))
                group = drafted[first : first + draft_size]
                if any(group):
                    self.add_drafting(of_draft, drafter, group, rank - first)
            reads = [work for work in plan.works if work.owner == first // draft_size]
            if num_read := sum(work.num_drafter_new for work in reads):
                of_draft.add_pass(drafter, num_read, num_read)
            if not works:
                continue
            if not self.draws:
                of_target.add("gather", 2 * rows)
                continue
            own_rows = sum(1 + work.num_drafts for work in parts[rank])
            of_target.add_turn(rows - own_rows, columns)
            depth = max(work.num_drafts for work in works)
            of_target.add("join_rows", max(map(len, parts)) * (3 * depth + 3))
        return of_target, of_draft

    def add_drafting(
        self, sent: Expected, drafter: Drafter, parts: list[list[Work]], member: int
    ) -> None:
        """Drafts of a group. Each level turns the logits behind all rows above it; behind each but
        the last one three integers of each row go to all members: what is read next."""
        works = [*itertools.chain(*parts)]
        levels = levels_of(works)
        width = -(-drafter.vocab_size // sent.size)
        if drafter.num_layers == 0:
            for _ in levels:
                sent.add_turn(len(works) - len(parts[member]), width)
            return
        unread = [
            work.num_tokens - drafter.token_shift - work.num_drafter_computed for work in works
        ]
        sent.add_pass(drafter, sum(unread), len(works))
        for level, num_above in enumerate((1, *levels[:-1])):
            if sent.is_compiled:  # a chain that has all its drafts is read no more
                parts = [[work for work in part if work.num_drafts > level] for part in parts]
            num_others = sum(map(len, parts)) - len(parts[member])
            if level:
                sent.add("join_rows", 3 * num_above * max(map(len, parts)))
                num_rows = num_above * sum(map(len, parts))
                sent.add_pass(drafter, num_rows, num_rows)
            sent.add_turn(num_above * num_others, width)


def levels_of(works: Sequence[Work]) -> tuple[int, ...]:
    """Rows of each level that a step drafts."""
    num_rows = max(work.num_drafts for work in works)
    shapes = {work.drafts.levels for work in works if work.drafts is not None}
    (levels,) = shapes
    shape = TreeShape(levels) if levels else TreeShape.chain(num_rows)
    return shape.with_room_for(num_rows).levels


SIZES = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]
CHAINS = [("qwen2", "draft_model", "float64", *sizes) for sizes in SIZES]
OTHERS = [("qwen2", name, "float64", 2, 2) for name in ("draft_model-tree", "eagle3", "medusa")]
COMPILED = [("llama-llama3-rope", "draft_model", "float32", 2, 2)]  # with weights of bfloat16


@pytest.mark.few(8)
@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize(
    ("family", "method", "dtype", "size", "draft_size"), [*CHAINS, *OTHERS, *COMPILED]
)
def test_each_rank_sends_what_the_plans_say_and_no_more(
    family: str, method: str, dtype: str, size: int, draft_size: int, draws: bool
) -> None:
    """A drafter on one rank sends nothing; no tensor over the vocabulary goes to one rank alone."""
    case = Case(family, method, dtype, size, draft_size, draws)
    speculative = speculation(family, method, NUM_DRAFTS)
    chosen = config(family, speculative, dtype=dtype, max_num_batched_tokens=200)
    loaded = spread_models(chosen, size, draft_size)
    llm = LLM.from_config(chosen, loaded[0])
    params = SamplingParams(temperature=float(draws), max_tokens=9, ignore_eos=True)
    groups = [[one.ranks.target, one.ranks.draft] for one in loaded]
    ranks = Recorded(llm, loaded)
    with ranks:
        run(llm, prompts_of((9, 14, 5, 11, 7)), params)
    assert llm.engine.stats.num_draft_tokens > 0
    for rank, own in enumerate(groups):
        for group, want in zip(own, case.expected(ranks.plans, rank), strict=True):
            assert sent_by(group) == (dict(want.calls), dict(want.sent))
    assert groups[0][1].calls.total() == 0 or draft_size > 1


def sent_by(group: RankGroup) -> Sent:
    return dict(group.calls), dict(group.sent_bytes)
