"""Plans the rows of every step, and books its results.

A request has tokens that are not computed yet: a whole prompt, a part of it, or only its newest
token. Drafts are rows after these tokens. All requests share one budget of rows. There is no
prefill phase and no decode phase, and no plain or speculative mode.
"""

from bisect import insort
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from outdraft.config.engine import CacheConfig, SchedulerConfig
from outdraft.control.facts import StepFacts
from outdraft.core.errors import CapacityError, RequestError
from outdraft.core.grammar import AllowedTokens, GrammarDrafts
from outdraft.core.plan import Admission, DraftChoice, StepPlan, StepResult, Work
from outdraft.core.request import BookedWork, FinishReason, Request, RequestStatus, ScheduledStep
from outdraft.drafting.policy import DraftPolicy
from outdraft.kv.block_pool import BlockPool, BlockTable, extend_hashes
from outdraft.scheduling.drafter_books import DrafterBooks, freest_groups, overdue_moves

# Which request comes first: the one of the lowest key. Priorities are as in vLLM.
_ORDERS: dict[str, Callable[[Request], tuple[float, ...]]] = {
    "fcfs": lambda request: (request.arrival_s,),
    "priority": lambda request: (request.priority, request.arrival_s),
}


class Scheduler:
    """Owns the requests, their tokens and their blocks.

    Invariants between steps (`check_invariants`): 0 <= num_computed < num_tokens for every live
    request; a running request holds exactly the blocks of its computed tokens; a waiting or
    finished one holds none.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cache: CacheConfig,
        pool: BlockPool,
        max_model_len: int,
        *,
        state_window: int = 0,
        drafter_max_kept: int | None = None,
        drafter_shares_cache: bool = False,
        num_draft_groups: int = 1,
    ) -> None:
        """
        Args:
            state_window, drafter_max_kept, drafter_shares_cache: as in DrafterBooks.
            num_draft_groups: each drafts for the requests that it owns.
        """
        self.config = config
        self.pool = pool
        self.max_model_len = max_model_len
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        self._block_size = cache.block_size
        self._prefix_caching = cache.enable_prefix_caching
        self._books = DrafterBooks(
            pool,
            cache.block_size,
            state_window,
            max_kept=drafter_max_kept,
            shares_cache=drafter_shares_cache,
        )
        self._num_draft_groups = num_draft_groups
        self._order = _ORDERS[config.scheduling_policy]
        self._tables: dict[str, BlockTable] = {}
        self._requests: dict[str, Request] = {}
        self._free_slots = list(range(config.max_num_seqs - 1, -1, -1))

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def check_room(self, count: int) -> None:
        """Raise CapacityError unless `count` more requests fit into the waiting queue."""
        if len(self.waiting) + count > self.config.max_waiting:
            raise CapacityError(
                f"the waiting queue is full ({self.config.max_waiting} requests): try again later"
            )

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: it could never run, however empty the pool.
            CapacityError: the waiting queue is full.
        """
        self.check_room(1)
        if request.id in self._requests:
            raise RequestError(f"request id {request.id!r} is in use", "request_id")
        self.check_fits(request)
        insort(self.waiting, request, key=self._order)
        self._requests[request.id] = request
        self._tables[request.id] = BlockTable(self.pool, self._block_size)

    def check_fits(self, request: Request) -> None:
        """Raise RequestError if the request needs more blocks than there are."""
        blocks = -(-request.max_total // self._block_size)
        if blocks > self.pool.num_blocks:
            raise RequestError(
                f"the request may need {request.max_total} tokens of KV cache, but the cache holds "
                f"{self.pool.num_blocks * self._block_size}: lower max_tokens, shorten the prompt "
                "or give the cache more memory",
                "max_tokens",
            )

    def table(self, request: Request) -> BlockTable:
        return self._tables[request.id]

    def decoding_requests(self) -> list[Request]:
        """Running requests with one token left to compute: only they can use a draft."""
        return [request for request in self.running if request.num_uncomputed == 1]

    def room(self) -> StepFacts:
        """The room that `schedule` leaves for drafts if it preempts no request; no request is named
        yet."""
        budget = self.config.max_num_batched_tokens
        num_needed = num_slack = prompt_rows = 0
        for request in self.running:
            num_new = min(request.num_uncomputed, budget)
            budget -= num_new
            if num_new > 1:
                prompt_rows += num_new
            held = len(self._tables[request.id].ids)
            end = request.num_computed + num_new
            blocks = max(held, -(-end // self._block_size))
            num_needed += blocks - held
            num_slack += blocks * self._block_size - end
        free_slots = (self.pool.num_free - num_needed) * self._block_size + num_slack
        if self.waiting and self._free_slots:
            prompt_rows += min(self.waiting[0].num_tokens, budget)
        return StepFacts((), prompt_rows, max(0, budget), max(0, free_slots))

    def unread_tokens(self, request: Request) -> int:
        """Tokens that the drafter would read now beyond those of a usual step."""
        return self._books.unread_tokens(request)

    def schedule(
        self,
        choices: Mapping[str, DraftChoice],
        follows: Callable[[Request], bool] | None = None,
        reads: Callable[[Request], bool] | None = None,
    ) -> ScheduledStep:
        """The next step: running requests first, then drafts, then as many waiting ones as fit.

        `choices` maps request ids to what they would like to verify. A choice is cut to what the
        budget and the pool allow: drafts never preempt a request.

        `follows`: a drafter that reads states should be able to draft for the request in one
        of the next steps; None: for none. If so for any, the states of the step are kept.
        `reads`: it may read the request's prompt as it passes by; None: no prompt. With a
        prefix cache it does for requests that never draft, too: others that find their blocks may.

        A waiting request is passed over while another one computes its next block. It takes that
        block from the prefix cache later. Others may start before it, but one slot is kept free
        for it.
        """
        num_running = len(self.running)
        rows = self._reserve_rows()
        if self._num_draft_groups > 1:
            for move in overdue_moves(self.running, self._num_draft_groups):
                self._books.change_owner(*move)
        budget = self.config.max_num_batched_tokens - sum(rows)
        works: list[Work] = []
        requests = self.running.copy()
        admissions: list[Admission] = []
        for request, num_new in zip(requests, rows, strict=True):
            work = self._work(request, num_new, choices.get(request.id), budget)
            works.append(work)
            budget -= work.num_drafts
        # A request that was preempted in this step would only be preempted again.
        may_admit = len(self.running) == num_running
        num_passed = 0
        while (
            may_admit and budget > 0 and num_passed < min(len(self.waiting), len(self._free_slots))
        ):
            request = self.waiting[num_passed]
            if self._gains_by_waiting(request):
                num_passed += 1
                continue
            will_draft = follows is not None and follows(request)
            work = self._admit(request, budget, will_draft=will_draft)
            if work is None:
                break
            works.append(work)
            requests.append(request)
            admissions.append(request.admission())
            budget -= work.num_rows
        keeps_states = self._follow(requests, works, choices, follows, reads)
        plan = StepPlan(tuple(works), keeps_states, tuple(admissions))
        return ScheduledStep(plan, tuple(requests))

    def commit(self, step: ScheduledStep, result: StepResult) -> list[BookedWork]:
        """Book a step; return the outcome for every live request.

        Tokens after one that ends the request are dropped. Finished requests give everything
        back before this returns. A request without finite logits is computed again without
        drafts, which may have spoilt them; if it had none, it ends with an error.
        """
        booked: list[BookedWork] = []
        keeps_states = step.plan.keeps_states
        for request, work, outcome in zip(step.requests, step.works, result.works, strict=True):
            if request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            request.may_draft = outcome.is_finite or work.drafts is None
            if not request.may_draft:
                self._books.drop_states(request)
                self.table(request).truncate(request.num_computed)
                booked.append(BookedWork(request, work, outcome, ()))
                continue
            known = request.num_computed, request.num_drafter_computed
            num_accepted = len(outcome.accepted_rows)
            self._books.advance(request, work, num_accepted, keeps_states=keeps_states)
            request.num_computed += work.num_new + num_accepted
            added: list[int] = []
            reason = request.failed()  # the grammar may have failed while masks were made
            for token_id in outcome.token_ids if reason is None else ():
                reason = request.append(token_id)
                added.append(token_id)
                if reason is not None:
                    break
            if outcome.is_finite:
                self._cache_full_blocks(request, *known)
            else:
                request.error, reason = _not_finite(request), FinishReason.ERROR
            booked.append(BookedWork(request, work, outcome, tuple(added)))
            if reason is not None:
                self.finish(request, reason)
            else:
                self.table(request).truncate(request.num_computed)
        return booked

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a live request and give back all it holds."""
        if request.status is RequestStatus.RUNNING:
            self._leave(request)
        else:
            self.waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        del self._tables[request.id]
        del self._requests[request.id]

    def stop(self, request: Request, num_output: int) -> None:
        """End a live request after num_output tokens of output; it may have made more by now."""
        self.finish(request, FinishReason.STOP)
        request.num_tokens = request.num_prompt + num_output

    def abort(self, request_id: str) -> Request | None:
        """End a request early; None if it is unknown or has ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self.finish(request, FinishReason.ABORT)
        return request

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance."""
        self.pool.check_invariants()
        slots = [*(r.slot for r in self.running if r.slot is not None), *self._free_slots]
        assert sorted(slots) == list(range(self.config.max_num_seqs))
        for request in self.running:
            assert request.status is RequestStatus.RUNNING
            assert 0 <= request.num_computed < request.num_tokens
            assert 0 <= request.num_drafter_computed <= request.num_tokens
            assert 0 <= request.num_states <= self._books.state_window
            assert 0 <= request.owner < self._num_draft_groups
            held = len(self.table(request).ids)
            assert held == -(-request.num_computed // self._block_size), (request.id, held)
        for request in self.waiting:
            assert request.num_computed == request.num_drafter_computed == 0
            assert not self.table(request).ids
        if not self.has_work:
            assert self.pool.num_free == self.pool.num_blocks

    def _follow(
        self,
        requests: Sequence[Request],
        works: list[Work],
        choices: Mapping[str, DraftChoice],
        follows: Callable[[Request], bool] | None,
        reads: Callable[[Request], bool] | None,
    ) -> bool:
        """Add the drafter's reads and gaps to the works; true if the step keeps states."""
        if not self._books.state_window or (follows is None and not choices):
            return False
        keeps_states = any(choice.num_model_drafts for choice in choices.values())
        for place, request in enumerate(requests):
            is_followed = follows is not None and follows(request)
            keeps_states |= is_followed
            if reads is None or not (is_followed or self._prefix_caching) or not reads(request):
                continue
            work = works[place]
            if num_reads := self._books.chunk_reads(request, work, self.table(request).ids):
                gap = self._books.gap_news(request) or work.gap
                works[place] = work._replace(num_drafter_new=num_reads, gap=gap)
                keeps_states = True
        return keeps_states

    def _reserve_rows(self) -> list[int]:
        """New tokens of every running request, at least one each, with blocks to write them to.

        Where the pool is too full, the requests that come last are preempted.
        """
        budget = self.config.max_num_batched_tokens
        rows: list[int] = []
        while len(rows) < len(self.running):
            request = self.running[len(rows)]
            num_behind = len(self.running) - len(rows) - 1  # each of them gets its one row
            num_new = min(request.num_uncomputed, budget - num_behind)
            if self.table(request).reserve(request.num_computed + num_new):
                rows.append(num_new)
                budget -= num_new
            else:
                self._preempt(self.running[-1])
        return rows

    def _work(
        self, request: Request, num_new: int, choice: DraftChoice | None, budget: int
    ) -> Work:
        """A running request's work, with as many of its drafts as rows and blocks allow."""
        table = self.table(request)
        samples = num_new == request.num_uncomputed
        # With more tokens left, the target has not yet computed states that a drafter may need.
        if choice is not None and samples and num_new == 1 and request.may_draft:
            free_slots = (len(table.ids) + self.pool.num_free) * self._block_size
            room = min(free_slots, self.max_model_len) - request.num_tokens
            choice = choice.truncated(min(budget, room, choice.most_drafts(request.max_drafts)))
        else:
            choice = None
        if choice is not None:
            choice = self._books.readable(request, choice, table.ids)
        if choice is not None:
            table.reserve(request.num_tokens + len(choice))
        assert request.slot is not None
        return Work(
            request.slot,
            request.num_computed,
            num_new,
            samples,
            choice,
            *table.news(),
            request.num_drafter_computed,
            self._books.gap_news(request),
            owner=request.owner,
        )

    def _admit(self, request: Request, budget: int, *, will_draft: bool) -> Work | None:
        """Start a waiting request, with the blocks that the prefix cache has for it."""
        known = self._cached_prefix(request)
        if will_draft:
            known = self._books.worth_taking(known)
        table = self.table(request)
        table.adopt(known)
        cached = len(known) * self._block_size
        num_new = min(request.num_tokens - cached, budget)
        if not table.reserve(cached + num_new):
            table.truncate(0)
            return None
        self.waiting.remove(request)
        groups = freest_groups(self.running, self._num_draft_groups, request)
        request.owner = self._books.best_read(request, known, groups)
        insort(self.running, request, key=self._order)
        request.status = RequestStatus.RUNNING
        request.slot = self._free_slots.pop()
        request.num_computed = cached
        self._books.admit(request, known)
        if request.num_preemptions == 0:
            request.num_cached = cached
        return self._work(request, num_new, None, 0)

    def _gains_by_waiting(self, request: Request) -> bool:
        """A running request that comes first computes a block that this one lacks.

        Sequences of one request do, and so do prompts with a common beginning. The running request
        gets its rows first, so waiting for it takes no longer than computing the block again.
        """
        if not self._takes_cached(request):
            return False
        self._name_blocks(request, request.num_tokens - 1)
        for other in self.running:
            block = other.num_computed // self._block_size  # the one that it fills next
            if block >= min(len(request.block_hashes), len(other.block_hashes)):
                continue
            prefix_hash = request.block_hashes[block]
            is_shared = other.block_hashes[block] == prefix_hash
            comes_first = self._order(other) <= self._order(request)
            if is_shared and comes_first and self.pool.find(prefix_hash) is None:
                return True
        return False

    def _takes_cached(self, request: Request) -> bool:
        return self._prefix_caching and request.params.prompt_logprobs is None

    def _name_blocks(self, request: Request, num_tokens: int) -> None:
        """Hash the full blocks of the first tokens."""
        extend_hashes(
            request.block_hashes,
            request.token_ids,
            self._block_size,
            num_tokens,
            request.block_salt,
        )

    def _cached_prefix(self, request: Request) -> list[int]:
        """Blocks of the longest known prefix; at least one token is left to compute."""
        last = request.num_tokens - 1
        if self._prefix_caching:  # also if it takes none itself: others wait for its blocks
            self._name_blocks(request, last)
        if not self._takes_cached(request):
            return []
        blocks: list[int] = []
        for prefix_hash in request.block_hashes[: last // self._block_size]:
            block = self.pool.find(prefix_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _preempt(self, request: Request) -> None:
        """Take a running request's memory; it will be computed again from its tokens."""
        self._leave(request)
        request.status = RequestStatus.WAITING
        request.num_computed = 0
        self._books.drop(request)
        request.num_preemptions += 1
        insort(self.waiting, request, key=self._order)

    def _leave(self, request: Request) -> None:
        assert request.slot is not None
        self.table(request).truncate(0)
        self._free_slots.append(request.slot)
        request.slot = None
        self.running.remove(request)

    def _cache_full_blocks(self, request: Request, computed: int, drafter_computed: int) -> None:
        """Enter the blocks filled since `computed` and `drafter_computed` were counted."""
        if not self._prefix_caching:
            return
        size = self._block_size
        # Tokens after the one that ended the request are in the cache, but not in the text.
        valid = min(request.num_computed, request.num_tokens)
        self._name_blocks(request, valid)
        blocks = self.table(request).ids
        for block in range(computed // size, min(valid // size, len(request.block_hashes))):
            self.pool.remember(blocks[block], request.block_hashes[block])
        self._books.mark_filled(request, drafter_computed, valid, blocks)


def _not_finite(request: Request) -> str:
    return (
        f"the model gave no finite logits for token {request.num_output + 1:,} of the output (they "
        "are NaN, infinite or all -inf): its weights are damaged, or too large for its dtype"
    )


def plan_step(scheduler: Scheduler, drafting: DraftPolicy) -> ScheduledStep:
    """The next step; its `works` are empty if there is nothing to do."""
    num_live = len(scheduler.running) + len(scheduler.waiting)
    num_running = min(num_live, scheduler.config.max_num_seqs)
    room = scheduler.room()
    choices = drafting.choose(scheduler.decoding_requests(), num_running, room)
    may_follow = drafting.may_follow(num_running)
    follows = drafting.limits.network_may_draft if may_follow else None
    reads = drafting.limits.network_can_read if may_follow and drafting.reads_prompts() else None
    return scheduler.schedule(choices, follows, reads)


def allowed_tokens(step: ScheduledStep, drafted: GrammarDrafts, vocab_size: int) -> AllowedTokens:
    """The masks of all rows whose logits are needed; a grammar that fails notes it itself."""
    pairs = zip(step.requests, step.works, strict=True)
    sampling = [(request, work) for request, work in pairs if work.samples]
    num_rows = sum(drafted.num_drafts) + len(drafted.num_drafts)
    masks_RW = np.full((num_rows, -(-vocab_size // 32)), -1, dtype=np.int32)
    ends: list[tuple[int, int]] = []
    start = 0
    for place, ((request, work), number) in enumerate(
        zip(sampling, drafted.num_drafts, strict=True)
    ):
        if request.grammar is not None:
            token_ids, parents = _draft(work, place, drafted)
            own_RW = masks_RW[start : start + 1 + len(token_ids)]
            rows = request.grammar.fill_masks(token_ids, parents, own_RW)
            ends += [(place, row - 1) for row in rows]
        start += 1 + number
    return AllowedTokens(masks_RW, np.array(ends, dtype=np.int64).reshape(-1, 2).T)


def _draft(work: Work, place: int, drafted: GrammarDrafts) -> tuple[Sequence[int], Sequence[int]]:
    """Ids and parents of a work's drafts."""
    if work.drafts is None:
        return (), ()
    if not work.drafts.num_model_drafts:
        return work.drafts.draft.token_ids, work.drafts.draft.parents
    if not drafted.num_drafts[place]:  # a live rule ended it before its first draft
        return (), ()
    assert drafted.drafts_2BN is not None
    token_ids, parents = drafted.drafts_2BN[:, place, : drafted.num_drafts[place]].tolist()
    return token_ids, parents
