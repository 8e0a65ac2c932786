"""Scores of ways to speculate, from replays of a trace: acceptance, and with costs speed."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from outdraft.config.speculation import HEAD_SOURCES, NETWORK_SOURCES, SpeculationConfig
from outdraft.control.costs import CostTable
from outdraft.core.draft import DraftSource
from outdraft.core.recorded import RecordedRequest
from outdraft.drafting.host_sources import HostProposer
from outdraft.planning.recorded_acceptance import RecordedAcceptance, recorded_networks
from outdraft.planning.replay import NO_COSTS, Replay, with_length

REPLAYED, FROM_TRACE = "replayed", "acceptance from the trace"


def recorded_score(requests: Sequence[RecordedRequest]) -> dict[str, Any]:
    """Sum up a trace without a replay.

    Returns:
        cached_tokens: of prompts, that the server's prefix cache supplied.
        span_s: from the first arrival to the last end.
        sources: as the server's drafts fared, see `_source_score`.
        level_chances: of networks' drafts, by source, see RecordedAcceptance.
    """
    outputs = [output for request in requests for output in request.outputs]
    drafts, drafted, accepted = Counter[str](), Counter[str](), Counter[str]()
    for step in (step for output in outputs for step in output.steps):
        drafts.update(list(step.drafted))
        drafted.update(step.drafted)
        accepted.update(step.accepted)
    curves = {
        str(source): RecordedAcceptance(source, requests).chances
        for source in recorded_networks(requests)
    }
    ends = [request.arrival_s + request.elapsed_s for request in requests]
    return {
        "num_requests": len(requests),
        "num_texts": len(outputs),
        "num_aborted": sum(output.finish_reason == "abort" for output in outputs),
        "prompt_tokens": sum(len(request.prompt_token_ids) for request in requests),
        "cached_tokens": sum(request.num_cached_tokens for request in requests),
        "output_tokens": sum(len(output.token_ids) for output in outputs),
        "span_s": max(ends) - requests[0].arrival_s,
        "sources": [
            _source_score(name, "as recorded", drafts[name], drafted[name], accepted[name])
            for name in sorted(drafted)
        ],
        "level_chances": curves,
    }


def plain_run(
    requests: Sequence[RecordedRequest], concurrency: int | None, table: CostTable | None
) -> Replay:
    """The trace without drafts."""
    return Replay(requests, concurrency, SpeculationConfig(), (), table or NO_COSTS).run()


def score(
    requests: Sequence[RecordedRequest],
    concurrency: int | None,
    config: SpeculationConfig,
    make_proposers: Callable[[SpeculationConfig], Sequence[HostProposer]],
    table: CostTable | None,
    lengths: Sequence[int],
) -> dict[str, Any]:
    """Replay a trace with a configuration: at its greatest length, with costs in all ways.

    Args:
        table: None: what steps cost is unknown.

    Returns:
        sources: at its greatest length, see `_source_score`.
        level_chances: of its network, by level, given that the levels above were accepted.
        level_labels: drafts that each is counted from.
        runs: ways to choose lengths, see `_run_score`; empty without costs.

    Raises:
        ConfigError: the trace, or the table, does not know the configuration's network.
    """

    def run(chosen: SpeculationConfig) -> Replay:
        proposers = make_proposers(chosen)
        return Replay(requests, concurrency, chosen, proposers, table or NO_COSTS).run()

    chances, labels, most = list[float](), list[int](), config.max_drafts
    if (network := config.network) is not None:
        recorded = RecordedAcceptance(network.source, requests)
        chances, labels = recorded.chances, recorded.labels
        if network.source in HEAD_SOURCES and len(config.sources) == 1 and network.tree is None:
            most = max(1, min(most, len(labels)))  # heads have no more levels than they are
    greatest = run(with_length(config, most))
    runs: list[tuple[str, int | None, Replay]] = []
    if table is not None:
        runs.append(("plain", 0, plain_run(requests, concurrency, table)))
        has_tree = network is not None and network.tree is not None  # which has one shape
        for length in sorted({one for one in lengths if 0 < one < most and not has_tree}):
            runs.append((f"fixed {length}", length, run(with_length(config, length))))
        runs.append((f"fixed {most}", most, greatest))
        runs.append(("adaptive", None, run(config)))
    stats = greatest.stats
    return {
        "method": "+".join(str(source) for source in config.methods),
        "sources": [
            _source_score(
                str(source),
                FROM_TRACE if source in NETWORK_SOURCES else REPLAYED,
                stats.drafts_by_source[source],
                stats.drafted_by_source[source],
                stats.accepted_by_source[source],
            )
            for source in DraftSource
            if stats.drafts_by_source[source]
        ],
        "level_chances": chances,
        "level_labels": labels,
        "runs": [_run_score(name, length, one, runs[0][2]) for name, length, one in runs],
    }


def _run_score(name: str, length: int | None, run: Replay, plain: Replay) -> dict[str, Any]:
    """Score one way to choose lengths.

    Returns:
        length: of every draft; 0: plain decoding; None: the controller chooses.
        tokens_per_s: of the time in which anything ran.
        tpot_ms: mean over texts; None: none has more than one token.
        against_plain: tokens_per_s by that of plain decoding.
        drafts_per_token: drafted tokens for each token of the output.
    """
    return {
        "name": name,
        "length": length,
        "tokens_per_s": run.tokens_per_s,
        "tpot_ms": run.tpot_ms,
        "against_plain": run.tokens_per_s / plain.tokens_per_s,
        "acceptance_length": run.stats.acceptance_length,
        "drafts_per_token": run.stats.num_draft_tokens / max(1, run.stats.num_emitted),
    }


def _source_score(
    source: str, basis: str, num_drafts: int, drafted: int, accepted: int
) -> dict[str, Any]:
    """Score the drafts of one source.

    Returns:
        basis: where their acceptance comes from.
        acceptance_rate: accepted per drafted token.
        acceptance_length: tokens that a step with such a draft brings.
    """
    return {
        "source": source,
        "basis": basis,
        "num_drafts": num_drafts,
        "drafted": drafted,
        "accepted": accepted,
        "acceptance_rate": accepted / max(1, drafted),
        "acceptance_length": 1 + accepted / max(1, num_drafts),
    }
