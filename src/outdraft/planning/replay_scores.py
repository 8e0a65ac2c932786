"""Scores of ways to speculate, from replays of a trace: acceptance, and with costs speed."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from outdraft.config.speculation import HEAD_SOURCES, NETWORK_SOURCES, SpeculationConfig
from outdraft.control.costs import CostTable
from outdraft.core.draft import DraftSource
from outdraft.core.recorded import RecordedRequest
from outdraft.engine.stats import StatsTotal
from outdraft.planning.recorded_acceptance import (
    LevelCounts,
    RecordedAcceptance,
    recorded_networks,
)
from outdraft.planning.replay import (
    NO_COSTS,
    ProposersMaker,
    RecordedTraffic,
    Replayed,
    replay,
    with_length,
)

REPLAYED, FROM_TRACE = "replayed", "acceptance from the trace"


@dataclass(frozen=True, slots=True)
class SourceScore:
    """Acceptance of the drafts of one source.

    Attributes:
        basis: where their acceptance comes from.
        acceptance_rate: accepted per drafted token.
        acceptance_length: tokens that a step with such a draft brings.
    """

    source: str
    basis: str
    num_drafts: int
    drafted: int
    accepted: int
    acceptance_rate: float
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class RunScore:
    """One way to choose lengths.

    Attributes:
        length: of every draft; 0: plain decoding; None: the controller chooses.
        tokens_per_s: of the time in which anything ran.
        tpot_ms: mean over texts; None: none has more than one token.
        against_plain: tokens_per_s by that of plain decoding.
        drafts_per_token: drafted tokens for each token of the output.
    """

    name: str
    length: int | None
    tokens_per_s: float
    tpot_ms: float | None
    against_plain: float
    acceptance_length: float
    drafts_per_token: float


@dataclass(frozen=True, slots=True)
class Score:
    """A configuration of speculation.

    Attributes:
        sources: at its greatest length.
        level_chances: of its network, by level, given that the levels above were accepted.
        level_labels: drafts that each is counted from.
        runs: empty without costs.
    """

    method: str
    sources: list[SourceScore]
    level_chances: list[float]
    level_labels: list[int]
    runs: list[RunScore]


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace in numbers.

    Attributes:
        cached_tokens: of prompts, that the server's prefix cache supplied.
        sources: as the server's drafts fared.
        level_chances: of networks' drafts, by source.
    """

    num_requests: int
    num_texts: int
    num_aborted: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    span_s: float
    sources: list[SourceScore]
    level_chances: dict[str, list[float]]


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """All that `outdraft replay` says.

    Attributes:
        concurrency: None: as the requests arrived.
        replayed_cached_tokens: as Recorded.cached_tokens, in the replay, whose cache is large.
    """

    recorded: Recorded
    concurrency: int | None
    replayed_cached_tokens: int
    scores: list[Score]


def recorded_score(requests: Sequence[RecordedRequest]) -> Recorded:
    """Sum up a trace without a replay."""
    outputs = [output for request in requests for output in request.outputs]
    drafts, drafted, accepted = Counter[str](), Counter[str](), Counter[str]()
    for step in (step for output in outputs for step in output.steps):
        drafts.update(list(step.drafted))
        drafted.update(step.drafted)
        accepted.update(step.accepted)
    curves = {
        str(source): RecordedAcceptance(source, requests).counts.chances
        for source in recorded_networks(requests)
    }
    ends = [request.arrival_s + request.elapsed_s for request in requests]
    return Recorded(
        num_requests=len(requests),
        num_texts=len(outputs),
        num_aborted=sum(output.finish_reason == "abort" for output in outputs),
        prompt_tokens=sum(len(request.prompt_token_ids) for request in requests),
        cached_tokens=sum(request.num_cached_tokens for request in requests),
        output_tokens=sum(len(output.token_ids) for output in outputs),
        span_s=max(ends) - requests[0].arrival_s,
        sources=[
            _source_score(name, "as recorded", drafts[name], drafted[name], accepted[name])
            for name in sorted(drafted)
        ],
        level_chances=curves,
    )


def plain_run(traffic: RecordedTraffic, table: CostTable | None) -> Replayed:
    """The trace without drafts."""
    return replay(traffic, SpeculationConfig(), (), table or NO_COSTS)


def score(
    traffic: RecordedTraffic,
    config: SpeculationConfig,
    make_proposers: ProposersMaker,
    costs: tuple[CostTable, Replayed] | None,
    lengths: Sequence[int],
) -> Score:
    """Replay a trace with a configuration: at its greatest length, with costs in all ways.

    Args:
        costs: the table, and what plain decoding takes by it.

    Raises:
        ConfigError: the trace, or the table, does not know the configuration's network.
    """
    table = costs[0] if costs is not None else NO_COSTS

    def run(chosen: SpeculationConfig) -> Replayed:
        return replay(traffic, chosen, make_proposers(chosen), table)

    counts = LevelCounts()
    if config.network is not None:
        source = config.network.source
        counts = RecordedAcceptance(source, traffic.requests).counts
    most = _greatest(config, counts)
    greatest = run(with_length(config, most))
    runs = list[RunScore]()
    if costs is not None:
        plain = costs[1]
        runs.append(_run_score("plain", 0, plain, plain))
        for length in _lengths(config, lengths, most):
            fixed = run(with_length(config, length))
            runs.append(_run_score(f"fixed {length}", length, fixed, plain))
        runs.append(_run_score(f"fixed {most}", most, greatest, plain))
        runs.append(_run_score("adaptive", None, run(config), plain))
    methods = "+".join(str(source) for source in config.methods)
    return Score(methods, _sources(greatest.stats), counts.chances, counts.reached, runs)


def _greatest(config: SpeculationConfig, counts: LevelCounts) -> int:
    """Most drafts of a step: heads alone have no more levels than they are."""
    network = config.network
    if network is None or len(config.sources) > 1 or network.tree is not None:
        return config.max_drafts
    if network.source in HEAD_SOURCES:
        return max(1, min(config.max_drafts, len(counts.reached)))
    return config.max_drafts


def _lengths(config: SpeculationConfig, wanted: Sequence[int], most: int) -> list[int]:
    """Those that are shorter than the greatest; a tree has one shape."""
    if config.network is not None and config.network.tree is not None:
        return []
    return [length for length in sorted(set(wanted)) if 0 < length < most]


def _run_score(name: str, length: int | None, run: Replayed, plain: Replayed) -> RunScore:
    stats = run.stats
    return RunScore(
        name,
        length,
        run.tokens_per_s,
        run.tpot_ms,
        run.tokens_per_s / plain.tokens_per_s,
        stats.acceptance_length,
        stats.num_draft_tokens / max(1, stats.num_emitted),
    )


def _sources(stats: StatsTotal) -> list[SourceScore]:
    return [
        _source_score(
            str(source),
            FROM_TRACE if source in NETWORK_SOURCES else REPLAYED,
            stats.drafts_by_source[source],
            stats.drafted_by_source[source],
            stats.accepted_by_source[source],
        )
        for source in DraftSource
        if stats.drafts_by_source[source]
    ]


def _source_score(
    source: str, basis: str, num_drafts: int, drafted: int, accepted: int
) -> SourceScore:
    return SourceScore(
        source,
        basis,
        num_drafts,
        drafted,
        accepted,
        accepted / max(1, drafted),
        1 + accepted / max(1, num_drafts),
    )
