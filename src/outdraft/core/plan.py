"""The messages of one step: its plan and its result.

A plan and its result cross between processes: see docs/design/0013.

A drafter that reads the target's states can only read where they are. States of tokens that were
computed while no request drafted are nowhere. So the drafter goes on after a gap: for it, the text
after the gap follows right on the text before. Its keys have other places than the target's then,
in the same blocks. The text that a drafter sees changes its drafts, never the output.

Dimension key: B requests of the step, N the most drafts of one of them, K logprobs asked for.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from msgspec import Struct

from outdraft.core.decision import CHAIN, Alarm, Decision, LiveStop, Shape
from outdraft.core.draft import Draft, DraftSource, depths_of
from outdraft.core.sampling import SamplingParams


class DrafterGap(Struct, array_like=True, frozen=True):
    """All that the drafter lacks of one text, as one gap.

    Attributes:
        num_tokens: how much further ahead a token stands in the text than in the drafter's cache.
        before: ids of the blocks that the drafter reads before the gap; all of them are full.
        next_block: place, in the request's table, of the block that is the next one for the
            drafter.
    """

    num_tokens: int = 0
    before: tuple[int, ...] = ()
    next_block: int = 0

    def blocks(self, block_ids: Sequence[int]) -> Sequence[int]:
        """The drafter's blocks, of a request that has `block_ids`."""
        if self.num_tokens == 0:
            return block_ids
        return [*self.before, *block_ids[self.next_block :]]

    def widened(
        self, num_read: int, start: int, block_ids: Sequence[int], block_size: int
    ) -> "DrafterGap":
        """The gap of a drafter that has read num_read tokens and goes on at `start` >= num_read.

        Only the full blocks of those num_read tokens stay.
        """
        num_full = (num_read - self.num_tokens) // block_size
        before = tuple(self.blocks(block_ids)[:num_full])
        return DrafterGap(start - num_full * block_size, before, start // block_size)


NO_GAP = DrafterGap()


class TokenRules(Struct, array_like=True, frozen=True):
    """Rules for choosing the tokens of one request: its parameters, resolved.

    Attributes:
        seed: the noise key of every choice, also of a request that asked for none.
        stop_ids: end-of-sequence and stop tokens, which min_tokens forbids.
        bad_words: token ids of each word of `params.bad_words`, none of them empty.
    """

    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()


class Admission(Struct, array_like=True, frozen=True, eq=False):
    """A request gets a slot, and has it until the slot's next admission.

    The slot has no blocks yet, and its drafter no gap: works name them.

    Attributes:
        slot: row of the device's state.
        token_ids: int32 [num_tokens], the text so far: more than the prompt after a preemption.
    """

    slot: int
    token_ids: np.ndarray
    num_prompt: int
    rules: TokenRules


NO_DRAFT = Draft()


class DraftChoice(Struct, array_like=True, frozen=True):
    """One request's speculation in this step.

    It is a draft from the host, or a number of drafts that a network makes on the device at the
    start of the step.

    Attributes:
        levels: rows by level of the network's tree; the network chooses which row continues which.
            CHAIN: it drafts a chain.
        stop: where the network's chain may end before; None: nowhere.
    """

    source: DraftSource
    draft: Draft = NO_DRAFT
    num_model_drafts: int = 0
    levels: Shape = CHAIN
    stop: LiveStop | None = None

    def __post_init__(self) -> None:
        if self.stop is not None and self.levels:
            raise ValueError("trees have no live rule")
        if self.stop is not None and len(self.stop.weights) < self.num_model_drafts:
            raise ValueError(
                f"a live rule of {len(self.stop.weights)} levels for {self.num_model_drafts}"
            )
        if self.num_model_drafts and len(self.draft):
            raise ValueError("one source drafts for a request in a step, not two")

    def __len__(self) -> int:
        return len(self.draft.token_ids) + self.num_model_drafts

    @property
    def is_device_tree(self) -> bool:
        """The host does not know which row continues which."""
        return len(self.levels) > 0

    def most_drafts(self, num_tokens: int) -> int:
        """Most drafts of this choice that are useful if at most num_tokens can be accepted."""
        return sum(self.levels[:num_tokens]) if self.levels else num_tokens

    def truncated(self, num_tokens: int) -> "DraftChoice | None":
        """The choice with at most num_tokens drafts; None: no draft is left."""
        if num_tokens >= len(self) > 0:
            return self
        if num_tokens <= 0:
            return None
        return DraftChoice(
            self.source,
            self.draft.truncated(num_tokens),
            min(self.num_model_drafts, num_tokens),
            self.levels,
            self.stop,
        )


class Work(NamedTuple):
    """One request's part of a step.

    Only changes of blocks are sent: the number of the slot's blocks that stay, and the ids that
    follow. Together they cover all rows of the work.

    Attributes:
        slot: of the request.
        start: tokens of the text that were computed before.
        num_new: tokens of the text that are computed now.
        samples: the newest token is among them, so the step yields at least one token more.
        drafts: verified after them; None unless the work samples.
        num_drafter_computed: tokens of the text that the drafter has read, if it drafts now.
        gap: of the drafter; None: it has not changed.
        num_drafter_new: new tokens, from the first one on, that the drafter reads after the pass.
        owner: the draft group that drafts for the request; its ranks verify the drafts.
    """

    slot: int
    start: int
    num_new: int
    samples: bool
    drafts: DraftChoice | None = None
    num_kept_blocks: int = 0
    new_block_ids: tuple[int, ...] = ()
    num_drafter_computed: int = 0
    gap: DrafterGap | None = None
    num_drafter_new: int = 0
    owner: int = 0

    @property
    def num_drafts(self) -> int:
        return len(self.drafts) if self.drafts is not None else 0

    @property
    def num_model_drafts(self) -> int:
        return self.drafts.num_model_drafts if self.drafts is not None else 0

    @property
    def num_rows(self) -> int:
        return self.num_new + self.num_drafts

    @property
    def num_tokens(self) -> int:
        """Length of the text that is computed then; the whole text if the work samples."""
        return self.start + self.num_new


class StepPlan(Struct, array_like=True, frozen=True):
    """The requests of a step in batch order.

    Attributes:
        keeps_states: the target's states are kept for a drafter that reads them.
        admissions: of the works' requests that had no slot before.
    """

    works: tuple[Work, ...]
    keeps_states: bool = False
    admissions: tuple[Admission, ...] = ()

    @property
    def num_rows(self) -> int:
        return sum(work.num_rows for work in self.works)


class TokenLogprobs(Struct, frozen=True):
    """Log-probabilities of one position, from the target's raw logits."""

    token_id: int
    logprob: float
    rank: int  # 1: no token is more likely
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class WorkResult(Struct, frozen=True):
    """The result of one request's part of a step.

    Attributes:
        token_ids: tokens emitted: the accepted drafts, then one of the target's own; empty if the
            work did not sample, or is not finite.
        accepted_rows: the rows of the draft that were accepted, from the root down.
        drafted_ids: the draft as it was verified.
        drafted_parents: its shape, as in Draft.
        logprobs: one entry per emitted token, if the request asked.
        prompt_logprobs: one entry per prompt position computed now whose next token is known.
        drafted_logprobs: the target's log-probability of each drafted token after its parent, if
            the request asked for log-probabilities and for a trace.
        is_finite: False: the target's logits after the text are no numbers to choose by (NaN,
            infinite or all -inf).
        margins: one for each level of the network that a live rule looked at: one more
            than were drafted if the rule, or its cap on rows, ended the draft. None: no such rule.
    """

    token_ids: tuple[int, ...] = ()
    accepted_rows: tuple[int, ...] = ()
    drafted_ids: tuple[int, ...] = ()
    drafted_parents: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    drafted_logprobs: tuple[float, ...] = ()
    is_finite: bool = True
    margins: tuple[float, ...] | None = None


def drafted_levels(choice: DraftChoice, result: WorkResult) -> int:
    """Levels of the draft that was verified."""
    if choice.is_device_tree or not choice.draft.is_chain:
        return max(depths_of(result.drafted_parents), default=0)
    return len(result.drafted_ids)


class PhaseTimes(Struct, frozen=True):
    """Seconds of the device's phases of a step.

    Attributes:
        verify_s: the target's pass, and choosing where that needs only its logits.
        sample_s: choosing otherwise, and the rest until the copy of ids has begun.
        keep_s: the part of sample_s that keeps the target's states for a drafter. Where the pass
            chooses, it also finds their places.
        is_first: something was made ready that later steps find: a kernel, a graph of a GPU.
    """

    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    keep_s: float = 0.0
    is_first: bool = False

    @property
    def plain_target_s(self) -> float:
        """Seconds of the target if no states are kept for a drafter."""
        return self.verify_s + self.sample_s - self.keep_s


class StepResult(Struct, frozen=True):
    """Results in the order of the plan's works.

    Attributes:
        num_rows: that the target read. A live rule may have left out some of those planned.
    """

    works: tuple[WorkResult, ...]
    num_rows: int
    times: PhaseTimes = PhaseTimes()


class StepStats(Struct, frozen=True):
    """One step in numbers.

    Attributes:
        accepted_at: number of requests that accepted a draft at depth i + 1.
        drafted_by_source, accepted_by_source: tokens.
        drafts_by_source: drafts.
        host_s: the step's time outside the device's phases.
        draft_lengths: drafted tokens of each request that sampled; 0: it had no draft.
        granted_lengths: tokens that each of them was granted before the step was planned; memory,
            or a chain's live rule, may have left fewer.
        draft_levels: of each verified draft: its first source, its levels, those accepted.
        decision: None: there was nothing to decide.
        alarms: that began or ended with this step.
    """

    num_requests: int
    num_waiting: int
    num_rows: int
    num_emitted: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_at: tuple[int, ...]
    drafted_by_source: dict[DraftSource, int]
    accepted_by_source: dict[DraftSource, int]
    drafts_by_source: dict[DraftSource, int]
    kv_usage: float
    times: PhaseTimes
    host_s: float
    draft_lengths: tuple[int, ...] = ()
    granted_lengths: tuple[int, ...] = ()
    draft_levels: tuple[tuple[DraftSource, int, int], ...] = ()
    decision: Decision | None = None
    alarms: tuple[Alarm, ...] = ()

    @property
    def step_s(self) -> float:
        times = self.times
        return times.draft_s + times.verify_s + times.sample_s + self.host_s
