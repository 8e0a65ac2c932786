"""A device that stores, instead of keys and values, the whole text they depend on."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from outdraft.core.draft import Draft, DraftSource
from outdraft.core.plan import StepResult, Work, WorkResult
from outdraft.core.request import Request, ScheduledStep
from outdraft.runner.state import RequestSlot
from tests.reference.draft_trees import tree_depths

Text = tuple[int, ...]
NOTHING_TO_KEEP: Text = (-1,)


@dataclass(frozen=True)
class Drafting:
    """A network's way of drafting: its source, the rows of its trees by level, `max_kept`."""

    source: DraftSource = DraftSource.MODEL
    levels: tuple[int, ...] = ()
    max_kept: int | None = None


MODEL_CHAIN = Drafting()


class SimulatedDevice:
    """Executes plans with random choices and checks all that is read.

    It knows blocks, gaps and the owners of slots only from plans; the requests are there to compare
    their texts.

    A slot of the target's cache holds the text up to and including its token. So does the
    drafter's, or one token more if it reads that together with the target's state. A state, too,
    is the text that it depends on. Each draft group has a cache and states of its own.
    """

    def __init__(
        self,
        rng: Random,
        block_size: int,
        vocab_size: int,
        drafting: Drafting = MODEL_CHAIN,
        state_window: int = 0,
    ) -> None:
        self.drafting = drafting
        self.state_window = state_window
        # By draft group, state row, and place in the window.
        self.states: dict[tuple[int, int | None, int], Text] = {}
        self.num_gaps = 0
        # Tokens of the text behind the network's last step; by request, its preemptions, its group.
        self.token_shift = 1 if drafting.max_kept == -1 else 0
        self.rng = rng
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.target: dict[int, Text] = {}
        self.drafter: dict[tuple[int, int], Text] = {}  # by draft group and slot
        self._settled: dict[str, tuple[int, int]] = {}  # preemptions, positions computed
        self._slots: dict[int, RequestSlot] = {}
        self._owners: dict[int, Request] = {}  # by slot

    def execute(self, step: ScheduledStep) -> StepResult:
        plan = step.plan
        self._take_news(step)
        drafted = [self._draft(work) for work in plan.works]
        for work in plan.works:
            if work.drafts is not None and work.drafts.num_model_drafts:
                request, slot = self._owners[work.slot], self._slots[work.slot]
                assert slot.gap == request.drafter_gap
                self.check_drafter(request, slot.block_ids, request.num_tokens - self.token_shift)
                self.num_gaps += slot.gap.num_tokens > 0
        written: set[int] = set()
        for work, draft in zip(plan.works, drafted, strict=True):
            self._check_order(work)
            slots = self._compute(work, draft)
            assert written.isdisjoint(slots), "two requests write to one slot"
            written |= slots
        for work in plan.works:
            blocks = self._slots[work.slot].block_ids
            self.check(self.target, self._owners[work.slot], blocks, work.start + work.num_new)
        results = tuple(map(self._verify, plan.works, drafted))
        for work, result in zip(plan.works, results, strict=True):
            self._read_chunk(work)
            if plan.keeps_states:
                self._keep_states(work, result)
        return StepResult(results, plan.num_rows)

    def _take_news(self, step: ScheduledStep) -> None:
        admitted = {one.slot: one for one in step.plan.admissions}
        self._slots |= {slot: RequestSlot(one) for slot, one in admitted.items()}
        assert len(admitted) == len(step.plan.admissions)
        assert len({work.slot for work in step.works}) == len(step.works)
        for request, work in zip(step.requests, step.works, strict=True):
            assert (work.slot, work.owner) == (request.slot, request.owner)
            if admission := admitted.pop(work.slot, None):
                assert admission.token_ids.tolist() == request.token_ids.tolist()
                assert admission.num_prompt == request.num_prompt
                self._owners[work.slot] = request
            assert self._owners[work.slot] is request
            self._slots[work.slot].update(work)
        assert not admitted, "a request without work was admitted"

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
        """The drafter has read the same, but for a gap: parts of this text, in its order."""
        text, gap = tuple(request.token_ids.tolist()), request.drafter_gap
        table, last = gap.blocks(blocks), -1
        for place in range(num_tokens - gap.num_tokens):
            found = self.drafter[request.owner, self._slot(table, place)]
            token = len(found) - 1 - self.token_shift
            assert found == text[: len(found)], (request.id, place)
            is_behind = place >= len(gap.before) * self.block_size
            assert token == place + gap.num_tokens if is_behind else token > last
            last = token

    def _slot(self, blocks: Sequence[int], place: int) -> int:
        return blocks[place // self.block_size] * self.block_size + place % self.block_size

    def _draft(self, work: Work) -> Draft:
        """The draft to verify; the drafter reads all tokens, and of its drafts what it keeps."""
        if work.drafts is None:
            return Draft()
        number = work.drafts.num_model_drafts
        if not number:
            return work.drafts.draft
        request, slot = self._owners[work.slot], self._slots[work.slot]
        assert work.num_drafter_computed == request.num_drafter_computed
        ids = [self.rng.randrange(self.vocab_size) for _ in range(number)]
        draft = Draft.chain(ids)
        if self.drafting.levels:
            draft = Draft(tuple(ids), self._parents(number))
            assert max(tree_depths(draft.parents)) <= request.max_drafts
        text = tuple(request.token_ids.tolist())
        num_read = request.num_tokens - self.token_shift
        self.check_drafter(request, slot.block_ids, request.num_drafter_computed)
        assert request.num_drafter_computed < num_read, "nothing to draft behind"
        if self.state_window and not self.token_shift:
            self._check_state(request, request.num_computed - 1)
        self._read(work, range(request.num_drafter_computed, num_read))
        if self.token_shift:
            for place in range(request.num_drafter_computed, num_read):
                self._check_state(request, place)
        table, missing = slot.drafter_block_ids, slot.gap.num_tokens
        for row in range(len(ids) - 1):  # behind the text; only a chain's own keys may be kept
            keeps = self.drafting.max_kept is None and not self.drafting.levels
            kept = (*text, *ids[: row + 1]) if keeps else NOTHING_TO_KEEP
            self.drafter[work.owner, self._slot(table, num_read - missing + row)] = kept
        return draft

    def _read(self, work: Work, places: range) -> None:
        """The drafter reads tokens of a text."""
        text, told = tuple(self._owners[work.slot].token_ids.tolist()), self._slots[work.slot]
        for place in places:
            slot = self._slot(told.drafter_block_ids, place - told.gap.num_tokens)
            self.drafter[work.owner, slot] = text[: place + 1 + self.token_shift]

    def _read_chunk(self, work: Work) -> None:
        if work.num_drafter_new:
            request, slot = self._owners[work.slot], self._slots[work.slot]
            assert request.num_drafter_computed == work.start
            assert slot.gap == request.drafter_gap
            assert work.num_drafter_new <= work.num_new
            end = work.start + work.num_drafter_new
            self.check_drafter(request, slot.block_ids, work.start)
            self._read(work, range(work.start, end))

    def _check_state(self, request: Request, place: int) -> None:
        found = self.states[request.owner, request.slot, place % self.state_window]
        assert found == tuple(request.token_ids[: place + 1].tolist())

    def _keep_states(self, work: Work, result: WorkResult) -> None:
        text = (*self._owners[work.slot].token_ids.tolist(), *result.token_ids)
        end = work.start + work.num_new + len(result.accepted_rows)
        first = max(work.start, end - self.state_window) if self.token_shift else end - 1
        for place in range(first, end):
            key = work.owner, work.slot, place % self.state_window
            self.states[key] = text[: place + 1]

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
        request = self._owners[work.slot]
        preemptions, settled = self._settled.get(request.id, (-1, 0))
        if preemptions == request.num_preemptions:
            assert work.start == settled
        else:
            assert work.start % self.block_size == 0
        assert work.num_new >= 1
        assert work.samples == (work.num_tokens == request.num_tokens)

    def _compute(self, work: Work, draft: Draft) -> set[int]:
        text = tuple(self._owners[work.slot].token_ids.tolist())
        blocks, slots = self._slots[work.slot].block_ids, set[int]()
        for place in range(work.start, work.start + work.num_new):
            slots.add(self._slot(blocks, place))
            self.target[self._slot(blocks, place)] = text[: place + 1]
        paths = [text]
        for row, (token_id, parent) in enumerate(zip(draft.token_ids, draft.parents, strict=True)):
            paths.append((*paths[parent], token_id))
            slot = self._slot(blocks, len(text) + row)
            slots.add(slot)
            self.target[slot] = paths[-1]
        return slots

    def _verify(self, work: Work, draft: Draft) -> WorkResult:
        """A random path is accepted, and its rows moved together."""
        rows: list[int] = []
        request, blocks = self._owners[work.slot], self._slots[work.slot].block_ids
        if work.samples:
            row = 0
            while self.rng.random() < 0.7:
                children = [i for i, parent in enumerate(draft.parents) if parent == row]
                if not children:
                    break
                rows.append(self.rng.choice(children))
                row = rows[-1] + 1
            start = request.num_tokens
            for depth, row in enumerate(rows):
                kept = self.target[self._slot(blocks, start + row)]
                self.target[self._slot(blocks, start + depth)] = kept
        settled = work.start + work.num_new + len(rows)
        self._settled[request.id] = (request.num_preemptions, settled)
        if not work.samples:
            return WorkResult()
        emitted = [*(draft.token_ids[row] for row in rows), self.rng.randrange(self.vocab_size)]
        return WorkResult(tuple(emitted), tuple(rows), draft.token_ids)
