"""What the ranks of an engine send, counted from the plans of its steps: nothing else may cross."""

import itertools
from collections import Counter
from collections.abc import Sequence

import pytest

from outdraft.core.plan import StepPlan, Work
from outdraft.core.sampling import SamplingParams
from outdraft.distributed.group import RankGroup
from outdraft.engine.llm import LLM
from outdraft.engine.loading import LoadedModels
from outdraft.models.config import ModelConfig
from outdraft.runner.model_runner import LaunchedStep, PendingStep
from tests.oracle.engines import config, pair, prompts_of, run, speculation
from tests.ranks import Spread, spread_models

FAMILY, NUM_DRAFTS = "qwen2", 3
NUMBER = 8  # bytes of a float64 and of an int64
Sent = tuple[dict[str, int], dict[str, int]]  # calls and bytes by operation


class Recorded(Spread):
    """Keeps all plans."""

    def __init__(self, llm: LLM, models: Sequence[LoadedModels]) -> None:
        self.plans: list[StepPlan] = []
        super().__init__(llm, models)

    def launch(self, plan: StepPlan) -> PendingStep | LaunchedStep:
        self.plans.append(plan)
        return super().launch(plan)


class Expected:
    """What one rank sends in a group."""

    def __init__(self, size: int) -> None:
        self.size, self.calls, self.sent = size, Counter[str](), Counter[str]()

    def add(self, operation: str, numbers: int, calls: int = 1) -> None:
        """`numbers`: of all calls, that each rank gets of this one."""
        if self.size > 1 and calls:
            self.calls[operation] += calls
            self.sent[operation] += (self.size - 1) * numbers * NUMBER

    def add_turn(self, num_rows: int, width: int) -> None:
        """`num_rows`: of other ranks."""
        if self.size > 1:
            self.calls["turn"] += 1
            self.sent["turn"] += num_rows * width * NUMBER

    def add_pass(self, model: ModelConfig, num_rows: int) -> None:
        """The embedding, and two products of each layer."""
        calls = 1 + 2 * model.num_layers
        self.add("sum", calls * num_rows * model.hidden_size, calls)


def split(works: Sequence[Work], size: int, draft_size: int) -> list[list[Work]]:
    """The works that each rank verifies."""
    parts: list[list[Work]] = []
    for group in range(size // draft_size):
        own = [work for work in works if work.owner == group]
        cuts = [len(own) * member // draft_size for member in range(draft_size + 1)]
        parts += [own[cuts[member] : cuts[member + 1]] for member in range(draft_size)]
    return parts


def expected(
    plans: list[StepPlan], rank: int, size: int, draft_size: int, draws: bool
) -> tuple[Expected, Expected]:
    """For the groups of target and drafter."""
    target, drafter = (ModelConfig.from_directory(path) for path in (_pair[0], _pair[1]))
    of_target, of_draft = map(Expected, (size, draft_size))
    columns = -(-target.vocab_size // size)
    for plan in plans:
        of_target.add_pass(target, plan.num_rows)
        works = [work for work in plan.works if work.samples]
        parts = split(works, size, draft_size)
        drafted = [[work for work in part if work.drafts is not None] for part in parts]
        if any(drafted):
            depth = max(work.num_drafts for work in itertools.chain(*drafted))
            of_target.add("join_rows", max(map(len, drafted)) * (2 * depth + 1))
            first = rank - rank % draft_size
            group = drafted[first : first + draft_size]
            if any(group):
                add_drafting(of_draft, drafter, group, rank - first)
        if not works:
            continue
        rows = sum(1 + work.num_drafts for work in works)
        if not draws:
            of_target.add("gather", 2 * rows)
            continue
        own_rows = sum(1 + work.num_drafts for work in parts[rank])
        of_target.add_turn(rows - own_rows, columns)
        depth = max(work.num_drafts for work in works)
        of_target.add("join_rows", max(map(len, parts)) * (3 * depth + 3))
    return of_target, of_draft


def add_drafting(
    sent: Expected, drafter: ModelConfig, parts: list[list[Work]], member: int
) -> None:
    """Chains of a draft group. Each level turns the logits of all its requests; behind each but the
    last one three integers of each request go to all members: what is read next."""
    works = [*itertools.chain(*parts)]
    levels = max(work.num_drafts for work in works)
    sent.add_pass(drafter, sum(work.num_tokens - work.num_drafter_computed for work in works))
    width = -(-drafter.vocab_size // sent.size)
    for _ in range(levels):
        sent.add_turn(len(works) - len(parts[member]), width)
    for _ in range(levels - 1):
        sent.add("join_rows", 3 * max(map(len, parts)))
        sent.add_pass(drafter, len(works))


_pair = pair(FAMILY).target, pair(FAMILY).drafter
SIZES = [(2, 1), (2, 2), (4, 1), (4, 2), (4, 4)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("size", "draft_size"), SIZES)
def test_each_rank_sends_what_the_plans_say_and_no_more(
    size: int, draft_size: int, temperature: float
) -> None:
    """A drafter on one rank sends nothing; no tensor over the vocabulary goes to one rank alone."""
    speculative = speculation(FAMILY, "draft_model", NUM_DRAFTS)
    chosen = config(FAMILY, speculative, dtype="float64", max_num_batched_tokens=200)
    loaded = spread_models(chosen, size, draft_size)
    llm = LLM.from_config(chosen, loaded[0])
    params = SamplingParams(temperature=temperature, max_tokens=9, ignore_eos=True)
    groups = [[one.ranks.target, one.ranks.draft] for one in loaded]
    ranks = Recorded(llm, loaded)
    with ranks:
        run(llm, prompts_of((9, 14, 5, 11, 7)), params)
    for rank, own in enumerate(groups):
        wanted = expected(ranks.plans, rank, size, draft_size, draws=temperature > 0)
        for group, want in zip(own, wanted, strict=True):
            assert sent_by(group) == (dict(want.calls), dict(want.sent))
    assert groups[0][1].traffic.calls.total() == 0 or draft_size > 1


def sent_by(group: RankGroup) -> Sent:
    return dict(group.traffic.calls), dict(group.traffic.sent_bytes)
