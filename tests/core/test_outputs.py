"""Speculation metrics against an example that was worked out by hand."""

import copy

import pytest

from outdraft.core.draft import DraftSource
from outdraft.core.outputs import (
    CompletionOutput,
    DraftTrace,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SpeculationMetrics,
    TargetChoice,
)


def example() -> SpeculationMetrics:
    """Four speculative steps: 4 drafts, 4 accepted; 4, 1; 2, 0; 4, 1."""
    metrics = SpeculationMetrics(num_spec_tokens=4)
    metrics.record({"ngram": 4}, {"ngram": 4})
    metrics.record({"draft_model": 4}, {"draft_model": 1})
    metrics.record({"ngram": 2}, {"ngram": 0})
    metrics.record({"draft_model": 4}, {"draft_model": 1})
    return metrics


def test_counts_rates_and_lengths_are_those_worked_out_by_hand():
    metrics = example()
    assert metrics.num_spec_steps == 4
    assert metrics.num_draft_tokens == 14
    assert metrics.num_accepted_draft_tokens == 6
    assert metrics.draft_acceptance_rate == pytest.approx(6 / 14)
    assert metrics.mean_acceptance_length == pytest.approx(1 + 6 / 4)
    assert metrics.accepted_by_source == {"ngram": 4, "draft_model": 2}


def test_histograms_count_steps_by_accepted_drafts():
    metrics = example()
    assert metrics.acceptance_histogram == [1, 2, 0, 0, 1]
    assert metrics.acceptance_histogram_by_draft_length == {2: [1, 0, 0], 4: [0, 2, 0, 0, 1]}


def test_nothing_drafted_yet_is_a_rate_of_zero_and_a_length_of_one():
    metrics = SpeculationMetrics(num_spec_tokens=2)
    assert metrics.draft_acceptance_rate == 0
    assert metrics.mean_acceptance_length == 1
    assert metrics.acceptance_histogram == [0, 0, 0]
    assert metrics.acceptance_histogram_by_draft_length == {}


def test_time_to_first_token_is_unknown_before_it():
    metrics = RequestMetrics(10.0, SpeculationMetrics(1))
    assert metrics.ttft_s is None
    metrics.first_token_s = 12.5
    assert metrics.ttft_s == 2.5


def test_a_snapshot_does_not_grow_with_its_output():
    metrics = RequestMetrics(0.0, SpeculationMetrics(4))
    metrics.speculative_decoding.record({"ngram": 4}, {"ngram": 2})
    completion = CompletionOutput(
        0, "ab", [1, 2], [DraftSource.NGRAM, TargetChoice.BONUS], logprobs=[{1: Logprob(-1.0, 1)}]
    )
    completion.trace = [DraftTrace((), (), (), (), 1)]
    output = RequestOutput("a", "p", [7], [completion], False, metrics, [None])
    kept = output.snapshot()
    before = copy.deepcopy(output)
    assert kept == before
    for grows in (
        completion.token_ids,
        completion.origins,
        completion.logprobs,
        completion.trace,
        output.prompt_logprobs,
    ):
        grows.append(grows[-1])
    metrics.speculative_decoding.record({"ngram": 3}, {"ngram": 1})
    completion.text, output.finished, metrics.num_preemptions = "abc", True, 1
    assert kept == before
