"""Counts of the tokens that the drafter has read of each running text, and can still read.

A language model needs ids only: it reads whatever it lacks when it drafts next. A drafter that
reads the target's states can only read where they are kept: of the newest tokens. It reads prompts
in the step of the target, as their states pass by, and goes on after a gap if it missed some.

Where a target's ranks form several draft groups, a request stays with its group, where the
drafter's keys and values of its text are. Groups draft and verify at the same time, so a step waits
for the one with the most requests, and for the one with the most that want drafts.
"""

from collections.abc import Sequence

from outdraft.core.plan import NO_GAP, DraftChoice, DrafterGap, Work
from outdraft.core.request import Request
from outdraft.kv.block_pool import NO_TOKEN, BlockPool


class DrafterBooks:
    """Keeps the drafter's counts of every request: `num_drafter_computed`, `drafter_gap`,
    `num_usual_unread` and `num_states`."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        state_window: int,
        *,
        max_kept: int | None = None,
        shares_cache: bool = False,
    ) -> None:
        """
        Args:
            state_window: number of a text's newest tokens whose states of the target are kept; 0:
                the drafter needs none.
            max_kept: number of accepted drafts after the text for which the drafter's own cache is
                valid after a step. None: all drafts but the last of a chain, and none of a tree (a
                language model). 0: no draft (heads, mask tokens). -1: not even the newest token,
                which is read together with a state that the target has yet to compute (EAGLE).
            shares_cache: it reads the target's own cache, which lacks the newest token only.
        """
        assert state_window > 0 or max_kept != -1, "nothing to read ahead with"
        self.state_window = state_window
        self._pool, self._block_size = pool, block_size
        self._max_kept = max_kept
        self._token_shift = 1 if max_kept == -1 else 0
        self._shares_cache = shares_cache

    def unread_tokens(self, request: Request) -> int:
        """Tokens that the drafter would read now beyond those of a usual step."""
        if self._shares_cache or (self.state_window and not self._token_shift):
            return 0  # heads draft with the newest state alone
        unread = request.num_tokens - self._token_shift - request.num_drafter_computed
        if self._token_shift:
            unread = min(unread, request.num_states)
        return max(0, unread - request.num_usual_unread)

    def worth_taking(self, known: list[int]) -> list[int]:
        """The blocks of a cached prefix that a request which will draft takes.

        It computes the newest ones of a window again if no drafter has read them. With the states
        of fewer tokens, acceptance would be lower than without the cache.
        """
        num_newest = -(-self.state_window // self._block_size)
        newest = known[-num_newest:] if self._token_shift else []
        if not newest or any(map(self._pool.has_drafter_read, newest)):
            return known
        return known[:-num_newest]

    def admit(self, request: Request, known: Sequence[int]) -> None:
        """The request starts with these blocks of the prefix cache, whose states are gone."""
        request.sent_gap = NO_GAP
        if not self._token_shift:
            self._skip_filled(request, known)
            return
        filled = tuple(b for i, b in enumerate(known) if self._is_filled(request, i, b))
        request.num_drafter_computed = len(known) * self._block_size
        missing = (len(known) - len(filled)) * self._block_size
        request.drafter_gap = DrafterGap(missing, filled, len(known)) if missing else NO_GAP

    def best_read(self, request: Request, known: Sequence[int], groups: Sequence[int]) -> int:
        """The draft group that has read most of these blocks of the prefix cache; of equal ones the
        first."""

        def num_filled(group: int) -> int:
            ahead = (self._token_behind(request, place) for place in range(len(known)))
            is_filled = self._pool.is_drafter_filled
            return sum(map(is_filled, known, ahead, [group] * len(known)))

        return max(groups, key=num_filled) if len(groups) > 1 else groups[0]

    def drop(self, request: Request) -> None:
        """All that was kept for the request is gone."""
        request.num_drafter_computed = request.num_states = 0
        request.num_usual_unread = 1
        request.drafter_gap = NO_GAP

    def change_owner(self, request: Request, group: int) -> None:
        """Another draft group drafts for the request from now on; it has read nothing of it."""
        request.owner = group
        self.drop(request)

    def gap_news(self, request: Request) -> DrafterGap | None:
        """The gap, if the runner does not know it; it does then."""
        if request.drafter_gap is request.sent_gap:
            return None
        request.sent_gap = request.drafter_gap
        return request.sent_gap

    def chunk_reads(self, request: Request, work: Work, block_ids: Sequence[int]) -> int:
        """Number of tokens of a prompt's chunk that the drafter reads at once: `num_drafter_new`.

        Others may take the blocks over from the next step on, and find no states then. The token
        before the newest one is left: the drafter drafts from the last token that it reads.
        """
        num_tokens = request.num_tokens + (1 if work.samples else 0)
        count = min(work.num_new, num_tokens - 2 - work.start) if self._token_shift else 0
        if count > 0:
            self._go_on_at(request, work.start, block_ids)
        return max(0, count)

    def readable(
        self, request: Request, choice: DraftChoice, block_ids: Sequence[int]
    ) -> DraftChoice | None:
        """The choice; None if the network cannot draft: none of the states that it reads were
        kept. It can in the next step."""
        if not choice.num_model_drafts:
            return choice
        if not self.state_window:
            self._skip_filled(request, block_ids)
            return choice
        if request.num_states == 0:
            return None
        if self._token_shift:
            self._go_on_at(request, request.num_computed - request.num_states, block_ids)
        return choice

    def advance(
        self, request: Request, work: Work, num_accepted: int, *, keeps_states: bool
    ) -> None:
        """Count the tokens that the drafter read in a step; call it before the text grows."""
        if work.drafts is not None and work.drafts.num_model_drafts:
            most = self._max_kept
            if most is None:
                most = 0 if work.drafts.levels else work.num_drafts - 1
            kept = min(num_accepted, most)
            request.num_drafter_computed = request.num_tokens + kept
            request.num_usual_unread = num_accepted + 1 - self._token_shift - kept
        elif work.num_drafter_new:
            request.num_drafter_computed = work.start + work.num_drafter_new
        num_kept = work.num_new + num_accepted
        num_states = request.num_states + num_kept
        if not self._token_shift and not work.samples:
            num_states = 0  # heads read states that have logits
        elif not self._token_shift and num_kept > 1:
            num_states = 1  # of each step they keep the last one
        request.num_states = min(num_states, self.state_window) if keeps_states else 0

    def drop_states(self, request: Request) -> None:
        """Forget the states: a step has overwritten them with those of a refused step."""
        request.num_states = 0

    def mark_filled(
        self, request: Request, computed: int, valid: int, block_ids: Sequence[int]
    ) -> None:
        """Others may use the blocks that the drafter has filled since `computed` was counted.

        `valid`: number of cached tokens that belong to the text.
        """
        size = self._block_size
        if request.drafter_gap.num_tokens % size:
            return  # its keys are not in the places of their tokens
        valid = min(request.num_drafter_computed, valid, request.num_tokens - self._token_shift)
        for block in range(computed // size, valid // size):
            ahead = self._token_behind(request, block)
            self._pool.mark_drafter_filled(block_ids[block], ahead, request.owner)
            if block < len(request.block_hashes):
                self._pool.prefer(block_ids[block], request.block_hashes[block])

    def _go_on_at(self, request: Request, start: int, block_ids: Sequence[int]) -> None:
        """The drafter reads on at `start` at the earliest."""
        read = request.num_drafter_computed
        if read < start:
            gap = request.drafter_gap
            request.drafter_gap = gap.widened(read, start, block_ids, self._block_size)
            request.num_drafter_computed = start

    def _skip_filled(self, request: Request, block_ids: Sequence[int]) -> None:
        """Count tokens that the drafter read for another request, in blocks that both hold."""
        block = request.num_drafter_computed // self._block_size
        num_full = request.num_computed // self._block_size
        while block < num_full and self._is_filled(request, block, block_ids[block]):
            block += 1
        filled = block * self._block_size
        request.num_drafter_computed = max(request.num_drafter_computed, filled)

    def _is_filled(self, request: Request, place: int, block: int) -> bool:
        ahead = self._token_behind(request, place)
        return self._pool.is_drafter_filled(block, ahead, request.owner)

    def _token_behind(self, request: Request, block: int) -> int:
        """The token after a block, if the drafter's layers of the block depend on it."""
        if not self._token_shift:
            return NO_TOKEN
        return int(request.token_ids[(block + 1) * self._block_size])


def freest_groups(running: Sequence[Request], num_groups: int, request: Request) -> list[int]:
    """Groups that a request may go to: of those with the fewest requests, those with the fewest of
    its kind (requests that want drafts, or requests that want none)."""
    alike = [one for one in running if one.wants_drafts == request.wants_drafts]
    counts = _counts(running, num_groups), _counts(alike, num_groups)
    loads = list(zip(*counts, strict=True))
    return [group for group, load in enumerate(loads) if load == min(loads)]


def overdue_moves(running: Sequence[Request], num_groups: int) -> list[tuple[Request, int]]:
    """Requests that should change to another group, and that group, so that no group has two more
    than another, nor two more that want drafts. Empty: the load is balanced.

    At most one of them wants drafts. Its new owner reads its text again, so the shortest one goes.
    """
    counts = _counts(running, num_groups)
    drafting = _counts([one for one in running if one.wants_drafts], num_groups)
    source, target = counts.index(max(counts)), counts.index(min(counts))
    if counts[source] - counts[target] >= 2:
        wants_drafts = drafting[source] - drafting[target] >= 2
        return [(_shortest(running, source, wants_drafts), target)]
    source, target = drafting.index(max(drafting)), drafting.index(min(drafting))
    if drafting[source] - drafting[target] < 2:
        return []
    moves = [(_shortest(running, source, wants_drafts=True), target)]
    if counts[target] >= counts[source]:  # one that wants no drafts comes back for it
        moves.append((_shortest(running, target, wants_drafts=False), source))
    return moves


def _shortest(running: Sequence[Request], group: int, wants_drafts: bool) -> Request:
    """The shortest text of a group; one of the other kind if there is none of this."""
    owned = [request for request in running if request.owner == group]
    return min(owned, key=lambda one: (one.wants_drafts != wants_drafts, one.num_tokens))


def _counts(running: Sequence[Request], num_groups: int) -> list[int]:
    counts = [0] * num_groups
    for request in running:
        counts[request.owner] += 1
    return counts
