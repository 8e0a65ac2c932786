"""Runs recorded requests once more, without a model: the engine's own code but for the device.

Scheduler, policy, proposers of the host and controller are the real ones. At each step drafts meet
the text that came (teacher forcing), so at temperature 0 a replay accepts what the engine accepted.
Time is what a table of costs says; the next arrival is waited for when nothing runs.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise, zip_longest

import numpy as np

from outdraft.config.engine import CacheConfig, SchedulerConfig
from outdraft.config.speculation import (
    BLOCK_SOURCES,
    HEAD_SOURCES,
    DraftNetworkConfig,
    SpeculationConfig,
)
from outdraft.control.controller import Controller
from outdraft.control.costs import CostCurve, CostTable
from outdraft.control.policy import FixedLength
from outdraft.core.draft import HEAD_WINDOW, MAX_DRAFTS, STATE_WINDOW, Draft, DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.plan import (
    DraftChoice,
    PhaseTimes,
    StepResult,
    Work,
    WorkResult,
)
from outdraft.core.recorded import RecordedOutput, RecordedRequest
from outdraft.core.request import BookedWork, FinishReason, Request, ScheduledStep
from outdraft.core.sampling import SamplingParams, SpeculationParams
from outdraft.drafting.host_sources import HostProposer
from outdraft.drafting.policy import DraftPolicy
from outdraft.drafting.request_limits import DrafterLimits
from outdraft.engine.stats import StatsTotal, step_stats
from outdraft.kv.block_pool import BlockPool
from outdraft.planning.recorded_acceptance import RecordedAcceptance
from outdraft.scheduling.scheduler import Scheduler, plan_step

NO_COSTS = CostTable(CostCurve((1,), (1.0,)))  # every step takes as long
MAX_POOL_TOKENS = 1 << 20  # that the prefix cache may remember at least
READ_STATES = (DraftSource.EAGLE, DraftSource.EAGLE3, DraftSource.MTP, *BLOCK_SOURCES)
WRONG_ID = 0  # of a network's draft that is refused; it is never read


@dataclass(slots=True)
class ReplayedText:
    """One sequence of a trace that is replayed.

    Attributes:
        index: of its request in the trace.
        output: what came.
        arrival_s: after that of the trace's first request.
        first_s, end_s: times of the replay; None until then.
        steps: (tokens, drafted, accepted) of each step that brought tokens.
    """

    request: Request
    index: int
    rule: str
    output: RecordedOutput
    arrival_s: float
    first_s: float | None = None
    end_s: float | None = None
    steps: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])

    @property
    def left(self) -> int:
        return len(self.output.token_ids) - self.request.num_output

    @property
    def tpot_s(self) -> float | None:
        """Mean time of a token after the first; None: it has none."""
        count = self.request.num_output - 1
        if self.first_s is None or self.end_s is None or count < 1:
            return None
        return (self.end_s - self.first_s) / count


def texts_of(requests: Sequence[RecordedRequest], max_model_len: int) -> list[ReplayedText]:
    """Every sequence of every request that was not refused; the number is its id."""
    made = list[ReplayedText]()
    for index, request in enumerate(requests):
        for output in request.outputs:
            replayed = Request(
                str(len(made)),
                request.prompt_token_ids,
                _params(request),
                seed=0,
                max_model_len=max_model_len,
                prediction_ids=request.prediction_token_ids,
            )
            arrival_s = request.arrival_s - requests[0].arrival_s
            made.append(ReplayedText(replayed, index, request.rule, output, arrival_s))
    return made


class Replay:
    """One run of a trace: the clock, and the engine's parts around a device that has none.

    Attributes:
        texts: all that came, by their numbers.
        busy_s: the sum of the steps.
        elapsed_s: until now, with the time in which nothing ran.
    """

    def __init__(
        self,
        requests: Sequence[RecordedRequest],
        concurrency: int | None,
        config: SpeculationConfig,
        proposers: Sequence[HostProposer],
        table: CostTable = NO_COSTS,
    ) -> None:
        """Prepare a run.

        Args:
            requests: of the trace, by arrival.
            concurrency: texts that run at once; each that ends makes room for the next. None: they
                arrive as they did.
            proposers: new ones, of the configuration's sources on the host.

        Raises:
            ConfigError: the trace has no drafts of the configuration's network, or the table knows
                nothing of its passes.
        """
        network = _network(requests, config, table)
        max_model_len = max(len(one.prompt_token_ids) + one.max_tokens for one in requests)
        settings, cache = SchedulerConfig(), CacheConfig()
        if concurrency is not None:
            rows = max(settings.max_num_batched_tokens, concurrency)
            settings = SchedulerConfig(max_num_seqs=concurrency, max_num_batched_tokens=rows)
        most = settings.max_num_seqs * (max_model_len + MAX_DRAFTS)
        self._scheduler = Scheduler(
            settings,
            cache,
            BlockPool(-(-max(MAX_POOL_TOKENS, most) // cache.block_size)),
            max_model_len,
            state_window=_state_window(network),
            drafter_max_kept=_max_kept(config.network),
        )
        is_fixed = config.control == "fixed" or not config.sources
        control = FixedLength(MAX_DRAFTS) if is_fixed else Controller(table, config.max_drafts)
        limits = _drafter_limits(config.network, network, max_model_len, self._scheduler)
        self._policy = DraftPolicy(
            config,
            proposers,
            limits,
            control,
            settings.max_num_seqs,
            clock=lambda: 0.0,  # lengths must not depend on how busy this machine is
        )
        self._table, self._network, self._drafter = table, network, limits
        self._coming = deque(texts_of(requests, max_model_len))
        self._concurrency = concurrency
        self._by_id: dict[str, ReplayedText] = {}
        self.stats = StatsTotal()
        self.elapsed_s = self.busy_s = 0.0

    def run(self) -> "Replay":
        """Step until every text has ended."""
        while self._coming or self._scheduler.has_work:
            self._admit()
            self._step()
        return self

    @property
    def texts(self) -> list[ReplayedText]:
        return list(self._by_id.values())

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that the prefix cache supplied."""
        return sum(text.request.num_cached for text in self.texts)

    @property
    def tokens_per_s(self) -> float:
        return self.stats.num_emitted / self.busy_s

    @property
    def tpot_ms(self) -> float | None:
        """Mean over texts of more than one token."""
        known = [text.tpot_s for text in self.texts if text.tpot_s is not None]
        return 1000 * sum(known) / len(known) if known else None

    def _admit(self) -> None:
        """Queue who has come by now; if nothing runs, wait for the next one."""
        scheduler = self._scheduler
        if not scheduler.has_work and self._concurrency is None:
            self.elapsed_s = max(self.elapsed_s, self._coming[0].arrival_s)
        while self._coming and self._has_come(self._coming[0]):
            text = self._coming.popleft()
            self._by_id[text.request.id] = text
            scheduler.add(text.request)

    def _has_come(self, text: ReplayedText) -> bool:
        scheduler = self._scheduler
        if self._concurrency is not None:
            return len(scheduler.running) + len(scheduler.waiting) < self._concurrency
        has_room = len(scheduler.waiting) < scheduler.config.max_waiting
        return text.arrival_s <= self.elapsed_s and has_room

    def _step(self) -> None:
        """Take a step with the parts of Engine.step; the clock advances by its cost."""
        scheduler, policy = self._scheduler, self._policy
        step = plan_step(scheduler, policy)
        result = self._execute(step)
        booked = scheduler.commit(step, result)
        drafts = any(work.drafts is not None for work in step.works)
        step_s = result.times.draft_s + result.times.verify_s
        step_s += self._table.booking_s(len(step.works), drafts=drafts)
        self.elapsed_s += step_s
        self.busy_s += step_s
        stats = step_stats(
            booked,
            result,
            step_s=step_s,
            num_waiting=len(scheduler.waiting),
            kv_usage=scheduler.pool.usage,
        )
        policy.observe(booked, stats)
        self.stats.add(stats)
        for one in booked:
            self._book(one)

    def _book(self, booked: BookedWork) -> None:
        """Note what a text gained; end it where it ended."""
        request, work, outcome, added = booked
        text = self._by_id[request.id]
        if added:
            text.first_s = self.elapsed_s if text.first_s is None else text.first_s
            drafted = len(outcome.drafted_ids)
            text.steps.append((len(added), drafted, len(outcome.accepted_rows)))
        if request.finish_reason is None and text.left == 0 and work.samples:
            if text.output.finish_reason in ("abort", "error"):
                self._scheduler.abort(request.id)
            else:
                self._scheduler.stop(request, request.num_output)
        if request.finish_reason is not None:
            text.end_s = self.elapsed_s
            if text.output.finish_reason in ("abort", "error"):
                request.finish_reason = FinishReason.ABORT  # it ended where it could go on no more
            self._policy.finish(request)

    def _execute(self, step: ScheduledStep) -> StepResult:
        """Tokens of a step, and its times: what a device would do."""
        draft_s, plan = self._draft_s(step), step.plan
        results = tuple(
            self._verify(work, self._by_id[request.id])
            for request, work in zip(step.requests, step.works, strict=True)
        )
        table, count = self._table, len(plan.works)
        context = sum(work.start + work.num_new for work in plan.works)
        target_s = float(table.target.at(np.array(plan.num_rows))) + table.context_s * context
        target_s += table.request_s * (count - 1)
        return StepResult(results, plan.num_rows, PhaseTimes(draft_s, target_s, 0.0))

    def _draft_s(self, step: ScheduledStep) -> float:
        """The network's passes and its catching up."""
        network, drafter = self._network, self._drafter
        cost = None if network is None else self._table.drafters.get(str(network.source))
        drafting = [
            (request, work.drafts)
            for request, work in zip(step.requests, step.works, strict=True)
            if work.drafts is not None and work.drafts.num_model_drafts
        ]
        if cost is None or drafter is None or not drafting:
            return 0.0
        lengths = [request.num_tokens for request, _ in drafting]
        context = cost.num_read(lengths)
        seconds = cost.step_s(lengths)
        # The pass for a level reads the rows of the level above.
        above = [(1, *level_sizes(choice)[:-1]) for _, choice in drafting]
        for rows in list(zip_longest(*above, fillvalue=0))[: cost.max_passes]:
            seconds += float(cost.passes.at(np.array(sum(rows)))) + cost.context_s * context
        unread = sum(drafter.unread_tokens(request) for request, _ in drafting)
        return seconds + float(cost.catch_up.at(np.array(unread)))

    def _verify(self, work: Work, text: ReplayedText) -> WorkResult:
        if not work.samples:
            return WorkResult()
        choice, place = work.drafts, text.request.num_output
        future = text.output.token_ids[place:]
        if choice is None:
            return WorkResult(tuple(future[:1]))
        if choice.num_model_drafts:
            draft, rows = self._network_draft(choice, text, future)
        else:
            draft = choice.draft
            rows = followed_rows(draft, future)
        return WorkResult(
            tuple(future[: len(rows) + 1]),
            rows,
            drafted_ids=draft.token_ids,
            drafted_parents=draft.parents,
        )

    def _network_draft(
        self, choice: DraftChoice, text: ReplayedText, future: list[int]
    ) -> tuple[Draft, tuple[int, ...]]:
        """A draft of the shape that was chosen; what is accepted is the first row of each level."""
        assert self._network is not None
        sizes = level_sizes(choice)
        place = text.request.num_output
        most = min(len(sizes), len(future))
        accepted = self._network.accepted(text.index, text.rule, int(text.request.id), place, most)
        token_ids, parents, firsts, above = list[int](), list[int](), list[int](), 0
        for level, size in enumerate(sizes):
            firsts.append(len(token_ids))
            right = future[level] if level < accepted else WRONG_ID
            token_ids += [right, *[WRONG_ID] * (size - 1)]
            parents += [above] * size
            above = firsts[-1] + 1
        return Draft(tuple(token_ids), tuple(parents)), tuple(firsts[:accepted])


def with_length(config: SpeculationConfig, num_drafts: int) -> SpeculationConfig:
    """Have every request draft `num_drafts` tokens in every step; 0: plain decoding."""
    if num_drafts == 0:
        return SpeculationConfig()
    return replace(config, num_speculative_tokens=num_drafts, control="fixed")


def _params(request: RecordedRequest) -> SamplingParams:
    """Parameters that scheduler and policy read."""
    return SamplingParams(
        temperature=request.temperature,
        seed=0 if request.rule == "drafter_invariant" else None,
        max_tokens=request.max_tokens,
        ignore_eos=True,
        speculation=SpeculationParams(
            enabled=request.may_draft,
            method=request.method,
            num_speculative_tokens=request.num_speculative_tokens,
        ),
    )


def _network(
    requests: Sequence[RecordedRequest], config: SpeculationConfig, table: CostTable
) -> RecordedAcceptance | None:
    if config.network is None:
        return None
    source = config.network.source
    network = RecordedAcceptance(source, requests)
    if not network.labels:
        raise ConfigError(
            f"the trace has no drafts of {source}, so their acceptance is unknown: "
            "record one while it drafts"
        )
    if table is not NO_COSTS and str(source) not in table.drafters:
        raise ConfigError(f"the table of costs knows nothing of the passes of {source}")
    return network


def _drafter_limits(
    config: DraftNetworkConfig | None,
    network: RecordedAcceptance | None,
    max_model_len: int,
    scheduler: Scheduler,
) -> DrafterLimits | None:
    """Limits of the network, which the policy would have if it were loaded."""
    if config is None or network is None:
        return None
    source = config.source
    levels = config.tree.levels if config.tree is not None and not config.tree.is_chain else ()
    in_one_pass = (*HEAD_SOURCES, *BLOCK_SOURCES)
    most = sum(levels) if levels else len(network.labels) if source in in_one_pass else MAX_DRAFTS
    return DrafterLimits(
        config.max_model_len or max_model_len + MAX_DRAFTS,
        source,
        (levels,),
        max_drafts=most,
        unread_tokens=scheduler.unread_tokens,
    )


def _max_kept(config: DraftNetworkConfig | None) -> int | None:
    """Accepted drafts for which the network's cache stays valid: see DrafterBooks."""
    if config is None:
        return None
    if config.source in READ_STATES:
        return -1
    return 0 if config.source in HEAD_SOURCES or config.parallel_drafting else None


def _state_window(network: RecordedAcceptance | None) -> int:
    """Tokens of each text whose states a network reads: see DrafterBooks."""
    if network is None or network.source is DraftSource.MODEL:
        return 0
    return HEAD_WINDOW if network.source in HEAD_SOURCES else STATE_WINDOW


def followed_rows(draft: Draft, future: list[int]) -> tuple[int, ...]:
    """Rows of the draft that the text went along, from the root down."""
    edges = list(zip(draft.parents, draft.token_ids, strict=True))
    rows, above = list[int](), 0
    for token_id in future:
        if (above, token_id) not in edges:
            break
        rows.append(edges.index((above, token_id)))
        above = rows[-1] + 1
    return tuple(rows)


def level_sizes(choice: DraftChoice) -> list[int]:
    """Rows of each level that a network drafts; the last one may be cut."""
    most = choice.num_model_drafts
    ends = [min(end, most) for end in accumulate(choice.levels or (1,) * most)]
    return [end - start for start, end in pairwise([0, *ends]) if end > start]
