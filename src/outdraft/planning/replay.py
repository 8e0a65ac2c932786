"""Runs recorded requests once more, without a model: the engine's own code but for the device.

Scheduler, policy, proposers of the host and controller are the real ones. At each step drafts meet
the text that came (teacher forcing), so at temperature 0 a replay accepts what the engine accepted.
Time is what a table of costs says; the next arrival is waited for when nothing runs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outdraft.config.engine import CacheConfig, SchedulerConfig
from outdraft.config.speculation import (
    BLOCK_SOURCES,
    HEAD_SOURCES,
    DraftNetworkConfig,
    SpeculationConfig,
)
from outdraft.control.controller import Controller
from outdraft.control.costs import CostCurve, CostTable
from outdraft.control.policy import FixedLength, LengthPolicy
from outdraft.core.draft import HEAD_WINDOW, MAX_DRAFTS, STATE_WINDOW, DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.recorded import RecordedRequest
from outdraft.core.request import BookedWork, FinishReason, Request
from outdraft.core.sampling import SamplingParams, SpeculationParams
from outdraft.drafting.host_sources import HostProposer
from outdraft.drafting.policy import DraftPolicy
from outdraft.drafting.request_limits import DrafterLimits
from outdraft.engine.stats import StatsTotal, step_stats
from outdraft.kv.block_pool import BlockPool
from outdraft.planning.recorded_acceptance import RecordedAcceptance
from outdraft.planning.replayed_device import ReplayedDevice, ReplayedText
from outdraft.scheduling.scheduler import Scheduler, plan_step

NO_COSTS = CostTable(CostCurve((1,), (1.0,)))  # every step takes as long
MAX_POOL_TOKENS = 1 << 20  # that the prefix cache may remember at least
READ_STATES = (DraftSource.EAGLE, DraftSource.EAGLE3, DraftSource.MTP, *BLOCK_SOURCES)

ProposersMaker = Callable[[SpeculationConfig], Sequence[HostProposer]]


@dataclass(frozen=True, slots=True)
class RecordedTraffic:
    """Requests that are replayed, and their arrival.

    Attributes:
        requests: of a trace, by arrival.
        concurrency: texts that run at once; each that ends makes room for the next. None: they
            arrive as they did.
    """

    requests: Sequence[RecordedRequest]
    concurrency: int | None = None

    @property
    def max_model_len(self) -> int:
        return max(len(one.prompt_token_ids) + one.max_tokens for one in self.requests)

    def texts(self) -> list[ReplayedText]:
        """Every sequence of every request that was not refused; the number is its id."""
        made = list[ReplayedText]()
        first_s = self.requests[0].arrival_s
        for index, request in enumerate(self.requests):
            params = _params(request)
            for output in request.outputs:
                replayed = Request(
                    str(len(made)),
                    request.prompt_token_ids,
                    params,
                    seed=0,
                    max_model_len=self.max_model_len,
                    prediction_ids=request.prediction_token_ids,
                )
                arrival_s = request.arrival_s - first_s
                made.append(ReplayedText(replayed, index, request.rule, output, arrival_s))
        return made


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay.

    Attributes:
        busy_s: the sum of its steps.
        elapsed_s: until the last text ended, with the time in which nothing ran.
        cached_tokens: of prompts, that the prefix cache supplied.
    """

    texts: list[ReplayedText]
    stats: StatsTotal
    busy_s: float
    elapsed_s: float
    cached_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.stats.num_emitted / self.busy_s

    @property
    def tpot_ms(self) -> float | None:
        """Mean over texts of more than one token."""
        times_s = [text.tpot_s for text in self.texts]
        known = [seconds for seconds in times_s if seconds is not None]
        return 1000 * sum(known) / len(known) if known else None


def replay(
    traffic: RecordedTraffic,
    config: SpeculationConfig,
    proposers: Sequence[HostProposer],
    table: CostTable = NO_COSTS,
) -> Replayed:
    """Run a trace with a configuration of speculation.

    proposers: new ones, of the configuration's sources on the host.

    Raises:
        ConfigError: the trace has no drafts of the configuration's network, or the table knows
            nothing of its passes.
    """
    network = _network(traffic, config, table)
    return _Replay(traffic, config, proposers, table, network).run()


class _Replay:
    """One run: the clock, and the engine's parts around a device that has none of its own."""

    def __init__(
        self,
        traffic: RecordedTraffic,
        config: SpeculationConfig,
        proposers: Sequence[HostProposer],
        table: CostTable,
        network: RecordedAcceptance | None,
    ) -> None:
        settings = SchedulerConfig()
        if traffic.concurrency is not None:
            rows = max(settings.max_num_batched_tokens, traffic.concurrency)
            settings = SchedulerConfig(
                max_num_seqs=traffic.concurrency, max_num_batched_tokens=rows
            )
        cache = CacheConfig()
        most = settings.max_num_seqs * (traffic.max_model_len + MAX_DRAFTS)
        blocks = -(-max(MAX_POOL_TOKENS, most) // cache.block_size)
        self._scheduler = Scheduler(
            settings,
            cache,
            BlockPool(blocks),
            traffic.max_model_len,
            state_window=_state_window(network),
            drafter_max_kept=_max_kept(config.network),
        )
        limits = _drafter_limits(config.network, network, traffic.max_model_len, self._scheduler)
        self._policy = DraftPolicy(
            config,
            proposers,
            limits,
            _control(config, table),
            settings.max_num_seqs,
            clock=lambda: 0.0,  # lengths must not depend on how busy this machine is
        )
        self._device = ReplayedDevice(table, network, limits)
        self._stats = StatsTotal()
        self._coming = deque(traffic.texts())
        self._concurrency = traffic.concurrency
        self._texts: dict[str, ReplayedText] = {}
        self._now_s = self._busy_s = 0.0

    def run(self) -> Replayed:
        """Until every text has ended."""
        while self._coming or self._scheduler.has_work:
            self._admit()
            self._step()
        texts = list(self._texts.values())
        cached = sum(text.request.num_cached for text in texts)
        return Replayed(texts, self._stats, self._busy_s, self._now_s, cached)

    def _admit(self) -> None:
        """Queue who has come by now; if nothing runs, wait for the next one."""
        scheduler = self._scheduler
        if not scheduler.has_work and self._concurrency is None:
            self._now_s = max(self._now_s, self._coming[0].arrival_s)
        while self._coming and self._has_come(self._coming[0]):
            text = self._coming.popleft()
            self._texts[text.request.id] = text
            scheduler.add(text.request)

    def _has_come(self, text: ReplayedText) -> bool:
        scheduler = self._scheduler
        if self._concurrency is not None:
            return len(scheduler.running) + len(scheduler.waiting) < self._concurrency
        has_room = len(scheduler.waiting) < scheduler.config.max_waiting
        return text.arrival_s <= self._now_s and has_room

    def _step(self) -> None:
        """Take a step with the parts of Engine.step; the clock advances by its cost."""
        scheduler, policy = self._scheduler, self._policy
        step = plan_step(scheduler, policy)
        result = self._device.execute(step, self._texts)
        booked = scheduler.commit(step, result)
        step_s = result.times.draft_s + result.times.verify_s
        step_s += self._device.host_s(step.plan)
        self._now_s += step_s
        self._busy_s += step_s
        stats = step_stats(
            booked,
            result,
            step_s=step_s,
            num_waiting=len(scheduler.waiting),
            kv_usage=scheduler.pool.usage,
        )
        policy.observe(booked, stats)
        self._stats.add(stats)
        for one in booked:
            self._book(one)

    def _book(self, booked: BookedWork) -> None:
        """Note what a text gained; end it where it ended."""
        request, work, outcome, added = booked
        text = self._texts[request.id]
        if added:
            text.first_s = self._now_s if text.first_s is None else text.first_s
            drafted = len(outcome.drafted_ids)
            text.steps.append((len(added), drafted, len(outcome.accepted_rows)))
        if request.finish_reason is None and text.left == 0 and work.samples:
            if text.output.finish_reason in ("abort", "error"):
                self._scheduler.abort(request.id)
            else:
                self._scheduler.stop(request, request.num_output)
        if request.finish_reason is not None:
            text.end_s = self._now_s
            if text.output.finish_reason in ("abort", "error"):
                request.finish_reason = FinishReason.ABORT  # it ended where it could go on no more
            self._policy.finish(request)


def with_length(config: SpeculationConfig, num_drafts: int) -> SpeculationConfig:
    """Have every request draft `num_drafts` tokens in every step; 0: plain decoding."""
    if num_drafts == 0:
        return SpeculationConfig()
    return replace(config, num_speculative_tokens=num_drafts, control="fixed")


def _control(config: SpeculationConfig, table: CostTable) -> LengthPolicy:
    if config.control == "fixed" or not config.sources:
        return FixedLength(MAX_DRAFTS)
    return Controller(table, config.max_drafts)


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
    traffic: RecordedTraffic, config: SpeculationConfig, table: CostTable
) -> RecordedAcceptance | None:
    if config.network is None:
        return None
    source = config.network.source
    network = RecordedAcceptance(source, traffic.requests)
    if network.num_drafts == 0:
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
    most = sum(levels) if levels else network.max_levels if source in in_one_pass else MAX_DRAFTS
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
