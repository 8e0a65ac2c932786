"""A device that stores, instead of keys and values, the whole text they depend on."""

from collections.abc import Sequence
from random import Random

from outdraft.core.draft import Draft
from outdraft.core.plan import (
    MODEL_CHAIN,
    ModelDrafting,
    StepPlan,
    StepResult,
    Work,
    WorkResult,
)
from outdraft.core.request import Request
from tests.reference.draft_trees import tree_depths

Text = tuple[int, ...]
NOTHING_TO_KEEP: Text = (-1,)


class SimulatedDevice:
    """Executes plans with random choices and checks all that is read.

    A slot of the target's cache holds the text up to and including its token. So does the
    drafter's, or one token more if it reads that together with the target's state.
    """

    def __init__(
        self, rng: Random, block_size: int, vocab_size: int, drafting: ModelDrafting = MODEL_CHAIN
    ) -> None:
        self.drafting = drafting
        self.lag = 1 if drafting.max_kept == -1 else 0
        self.rng = rng
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.target: dict[int, Text] = {}
        self.drafter: dict[int, Text] = {}
        self._settled: dict[str, tuple[int, int]] = {}  # preemptions, positions computed

    def execute(self, plan: StepPlan) -> StepResult:
        drafted = [self._draft(work) for work in plan.works]
        for work in plan.works:
            if work.drafts is not None and work.drafts.num_model_drafts:
                num_read = work.request.num_tokens - self.lag
                self.check_drafter(work.request, work.block_ids, num_read)
        written: set[int] = set()
        for work, draft in zip(plan.works, drafted, strict=True):
            self._check_order(work)
            slots = self._compute(work, draft)
            assert written.isdisjoint(slots), "two requests write to one slot"
            written |= slots
        for work in plan.works:
            self.check(self.target, work.request, work.block_ids, work.start + work.num_new)
        results = map(self._verify, plan.works, drafted)
        return StepResult(tuple(results), plan.num_rows)

    def check(
        self,
        cache: dict[int, Text],
        request: Request,
        blocks: Sequence[int],
        num_tokens: int,
        ahead: int = 0,
    ) -> None:
        """The first num_tokens of the request are in the cache, and they are this text's."""
        text = tuple(request.token_ids.tolist())
        for place in range(num_tokens):
            found = cache[self._slot(blocks, place)]
            assert found == text[: place + 1 + ahead], (request.id, place)

    def check_drafter(self, request: Request, blocks: Sequence[int], num_tokens: int) -> None:
        """The same for the drafter's cache."""
        self.check(self.drafter, request, blocks, num_tokens, self.lag)

    def _slot(self, blocks: Sequence[int], place: int) -> int:
        return blocks[place // self.block_size] * self.block_size + place % self.block_size

    def _draft(self, work: Work) -> Draft:
        """The draft to verify; the drafter reads all tokens, and of its drafts what it keeps."""
        if work.drafts is None:
            return Draft()
        number = work.drafts.num_model_drafts
        if not number:
            return work.drafts.draft
        request, host = work.request, work.drafts.draft.token_ids
        ids = [*host, *(self.rng.randrange(self.vocab_size) for _ in range(number))]
        draft = Draft.chain(ids)
        if self.drafting.is_tree:
            draft = Draft(tuple(ids), self._parents(number))
            assert max(tree_depths(draft.parents)) <= request.max_drafts
        text = tuple(request.token_ids.tolist())
        num_read = request.num_tokens - self.lag
        self.check_drafter(request, work.block_ids, request.num_drafter_computed)
        self.check(self.target, request, work.block_ids, num_read if self.lag else 0)
        for place in range(request.num_drafter_computed, num_read):
            self.drafter[self._slot(work.block_ids, place)] = text[: place + 1 + self.lag]
        for row in range(len(ids) - 1):  # behind the text; only a chain's own keys may be kept
            keeps = self.drafting.max_kept is None
            kept = (*text, *ids[: row + 1]) if keeps else NOTHING_TO_KEEP
            self.drafter[self._slot(work.block_ids, num_read + row)] = kept
        return draft

    def _parents(self, number: int) -> tuple[int, ...]:
        """The parents of a tree's first rows: any row of the level above."""
        parents: list[int] = []
        above = range(1)
        for size in self.drafting.levels:
            parents += [self.rng.choice(above) for _ in range(size)]
            above = range(len(parents) - size + 1, len(parents) + 1)
        assert number <= len(parents)
        return tuple(parents[:number])

    def _check_order(self, work: Work) -> None:
        """Positions are computed one after the other, and again only after a preemption."""
        preemptions, settled = self._settled.get(work.request.id, (-1, 0))
        if preemptions == work.request.num_preemptions:
            assert work.start == settled
        else:
            assert work.start % self.block_size == 0
        assert work.num_new >= 1
        assert work.samples == (work.start + work.num_new == work.request.num_tokens)

    def _compute(self, work: Work, draft: Draft) -> set[int]:
        text = tuple(work.request.token_ids.tolist())
        slots: set[int] = set()
        for place in range(work.start, work.start + work.num_new):
            slots.add(self._slot(work.block_ids, place))
            self.target[self._slot(work.block_ids, place)] = text[: place + 1]
        paths = [text]
        for row, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            paths.append((*paths[parent], token_id))
            slot = self._slot(work.block_ids, len(text) + row)
            slots.add(slot)
            self.target[slot] = paths[-1]
        return slots

    def _verify(self, work: Work, draft: Draft) -> WorkResult:
        """A random path is accepted, and its rows moved together."""
        rows: list[int] = []
        if work.samples:
            row = 0
            while self.rng.random() < 0.7:
                children = [i for i, parent in enumerate(draft.parents) if parent == row]
                if not children:
                    break
                rows.append(self.rng.choice(children))
                row = rows[-1] + 1
            start = work.request.num_tokens
            for depth, row in enumerate(rows):
                kept = self.target[self._slot(work.block_ids, start + row)]
                self.target[self._slot(work.block_ids, start + depth)] = kept
        settled = work.start + work.num_new + len(rows)
        self._settled[work.request.id] = (work.request.num_preemptions, settled)
        if not work.samples:
            return WorkResult()
        emitted = [*(draft.token_ids[row] for row in rows), self.rng.randrange(self.vocab_size)]
        return WorkResult(tuple(emitted), tuple(rows), draft.token_ids)
