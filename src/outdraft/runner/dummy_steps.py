"""Steps of made-up texts, run by an idle engine's runner: to measure them, and to make graphs.

The texts lie in the first blocks of the cache, which hold nothing yet, and no scheduler knows them.
Their tokens differ: equal rows would all meet the same experts, where a network has any.
Nothing is booked, so that a step can be repeated.
"""

import time
from typing import NamedTuple

import numpy as np

from outdraft.config.engine import SchedulerConfig
from outdraft.core.decision import CHAIN, LiveStop
from outdraft.core.draft import Draft, DraftSource
from outdraft.core.plan import Admission, DraftChoice, PhaseTimes, StepPlan, TokenRules, Work
from outdraft.core.sampling import SamplingParams
from outdraft.runner.parallel_runner import StepRunner
from outdraft.runner.results import PendingStep

SHORT, LONG = 16, 1024  # tokens of a text
MOST_DRAFTS = 63  # after a short text
MOST_FIRST_TIMES = 4  # of a step, in which something is made ready


class DummyStep(NamedTuple):
    """A step to run. Drafts are spread over the requests that are not idle.

    Attributes:
        num_rows: newest tokens and drafts.
        is_network: the network drafts; else the drafts are the host's.
        is_tree: the network drafts a tree, else a chain.
        is_long: one request with a long text; else the texts are short.
        num_unread: tokens that the network has not read, beyond the 2 of a step after one whose
            drafts were all accepted. -1: 1 token is left.
        num_idle: requests at the end that have no drafts.
        tells_margins: the network reports the margin of each level.
    """

    num_requests: int
    num_rows: int
    is_network: bool = False
    is_tree: bool = False
    is_long: bool = False
    num_unread: int = 0
    num_idle: int = 0
    tells_margins: bool = False

    def num_drafts(self, index: int) -> int:
        """Count the drafts of a request, by its index."""
        number = self.num_requests - self.num_idle
        share, more = divmod(self.num_rows - self.num_requests, number)
        return share + (index < more) if index < number else 0


class PhaseSeconds(NamedTuple):
    """Seconds of a step: drafting; the target's pass until ids are chosen; the runner's rest."""

    draft_s: float
    target_s: float
    host_s: float


class DummySteps:
    """Runs steps; the runner must be idle, and its cache without any text.

    Attributes:
        max_requests: that the cache has room for.
        num_long: tokens of the long text.
        ready_s: seconds of runs in which something was made ready for those that count.
    """

    def __init__(
        self,
        runner: StepRunner,
        limits: SchedulerConfig,
        max_model_len: int,
        most_long: int = LONG,
        *,
        first_runs_count: bool = True,
        temperature: float = 1.0,
    ) -> None:
        """
        Args:
            most_long: tokens of the long text, where the cache has room for twice as many.
            first_runs_count: False: the first run of each step compiles or loads what it needs.
            temperature: of all texts.
        """
        self._runner, self._max_rows = runner, limits.max_num_batched_tokens
        self._max_len = max_model_len
        self.ready_s = 0.0
        self._first_runs_count, self._known = first_runs_count, set[DummyStep]()
        self._temperature = temperature
        size, num_blocks = runner.cache.block_size, runner.cache.num_blocks
        length = min(max_model_len, num_blocks * size)
        self.num_long = min(most_long, length // 2)
        blocks = -(-min(length, SHORT + 1 + MOST_DRAFTS) // size)
        self.max_requests = min(limits.max_num_seqs, num_blocks // blocks)
        self._short = [
            self._text(min(SHORT, length - 1), slot, range(slot * blocks, (slot + 1) * blocks))
            for slot in range(self.max_requests)
        ]
        needed = -(-min(length, self.num_long + 1 + MOST_DRAFTS) // size)
        self._long = [self._text(self.num_long, 0, range(needed))]
        self._admitted: dict[int, Admission] = {}  # by slot
        for layer in runner.cache.layers:  # memory that was never written is read too fast
            for cached in (layer.k_PSGC, layer.v_PSGE):
                cached[: -(-self.num_long // size)].fill_(0.01)

    def fits(self, step: DummyStep) -> bool:
        """There is room for it."""
        texts = self._long if step.is_long else self._short[: step.num_requests]
        if len(texts) < step.num_requests:
            return False
        admission, block_ids = texts[0]
        length = min(len(block_ids) * self._runner.cache.block_size, self._max_len)
        has_room = admission.num_prompt + step.num_drafts(0) < length
        has_unread = admission.num_prompt >= 2 + step.num_unread
        return has_room and step.num_rows <= self._max_rows and has_unread

    def run(self, step: DummyStep) -> PhaseSeconds:
        """Run it once, after everything is ready that is made ready once."""
        step_s, times = self._run(step)
        is_first = step not in self._known and not self._first_runs_count
        self._known.add(step)
        for _ in range(MOST_FIRST_TIMES):
            if not (times.is_first or is_first):
                break
            self.ready_s += step_s
            is_first = False
            step_s, times = self._run(step)
        target_s = times.verify_s + times.sample_s
        return PhaseSeconds(times.draft_s, target_s, max(0.0, step_s - times.draft_s - target_s))

    def _run(self, step: DummyStep) -> tuple[float, PhaseTimes]:
        plan = self._plan(step)
        started_s = time.perf_counter()
        pending = self._runner.launch(plan)
        assert isinstance(pending, PendingStep), "no text has a grammar"
        times = self._runner.collect(pending).times
        return time.perf_counter() - started_s, times

    def _plan(self, step: DummyStep) -> StepPlan:
        texts = self._long if step.is_long else self._short[: step.num_requests]
        works, admissions = list[Work](), list[Admission]()
        for index, (admission, block_ids) in enumerate(texts):
            slot = admission.slot
            blocks: tuple[int, tuple[int, ...]] = len(block_ids), ()
            if self._admitted.get(slot) is not admission:
                self._admitted[slot] = admission
                admissions.append(admission)
                blocks = 0, block_ids
            choice = self._choice(step, index)
            # After a usual step a network reads the newest token and at most the one before.
            num_read = admission.num_prompt - 2 - step.num_unread
            start = admission.num_prompt - 1
            owner = index % self._runner.num_draft_groups
            work = Work(slot, start, 1, True, choice, *blocks, num_read)
            works.append(work._replace(owner=owner))
        proposer = self._runner.proposer
        reads_states = proposer is not None and proposer.drafter.state_window > 0
        keeps_states = step.is_network and reads_states
        return StepPlan(tuple(works), keeps_states, tuple(admissions))

    def _choice(self, step: DummyStep, index: int) -> DraftChoice | None:
        count = step.num_drafts(index)
        if count == 0:
            return None
        if not step.is_network:
            return DraftChoice(DraftSource.NGRAM, Draft.chain(self._ids(count, -1 - index)))
        assert self._runner.proposer is not None
        proposer = self._runner.proposer
        levels = proposer.shapes[0] if step.is_tree else CHAIN
        stop = LiveStop((0.0,) * count, (0.0,) * count, price=0.0) if step.tells_margins else None
        source = proposer.drafter.source
        return DraftChoice(source, num_model_drafts=count, levels=levels, stop=stop)

    def _ids(self, count: int, text: int) -> list[int]:
        """Tokens of a text, by its number, or of drafts."""
        vocab_size = self._runner.model.config.vocab_size
        return [(7 * place + 1009 * text) % vocab_size for place in range(count)]

    def _text(
        self, num_tokens: int, slot: int, block_ids: range
    ) -> tuple[Admission, tuple[int, ...]]:
        """A made-up text, and its blocks."""
        ids = np.array(self._ids(num_tokens, slot), dtype=np.int32)
        rules = TokenRules(SamplingParams(temperature=self._temperature), seed=slot)
        return Admission(slot, ids, num_tokens, rules), tuple(block_ids)
