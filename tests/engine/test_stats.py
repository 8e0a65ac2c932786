"""Sums over steps against an example worked out by hand."""

from collections.abc import Sequence

import pytest

from outdraft.core.draft import Draft, DraftSource
from outdraft.core.plan import DraftChoice, PhaseTimes, StepResult, Work, WorkResult
from outdraft.core.request import BookedWork, Request
from outdraft.core.sampling import SamplingParams
from outdraft.engine.stats import StatsTotal, step_stats


def work(drafts: DraftChoice | None) -> Work:
    return Work(0, 0, 1, True, drafts)


def booked_of(
    works: Sequence[Work], results: Sequence[WorkResult], names: str = "abc"
) -> list[BookedWork]:
    """All that was emitted was added."""
    return [
        BookedWork(
            Request(name, [1], SamplingParams(), seed=0, max_model_len=9),
            work,
            result,
            result.token_ids,
        )
        for name, work, result in zip(names[: len(works)], works, results, strict=True)
    ]


def example():
    """Three requests: three model drafts, two accepted; two n-gram drafts, none; no draft."""
    works = [
        work(DraftChoice(DraftSource.MODEL, num_model_drafts=3)),
        work(DraftChoice(DraftSource.NGRAM, Draft.chain([1, 2]))),
        work(None),
    ]
    results = [
        WorkResult((5, 6, 7), (0, 1), (5, 6, 9)),
        WorkResult((8,), (), (1, 2)),
        WorkResult((4,)),
    ]
    booked = booked_of(works, results)
    times = PhaseTimes(draft_s=0.1, verify_s=0.5, sample_s=0.2)
    return step_stats(
        booked,
        StepResult(tuple(results), 8, times),
        step_s=1.0,
        num_waiting=4,
        kv_usage=0.5,
    )


def test_a_step_in_numbers():
    step = example()
    assert (step.num_requests, step.num_waiting, step.num_rows) == (3, 4, 4 + 3 + 1)
    assert (step.num_emitted, step.num_drafts) == (5, 2)
    assert (step.num_draft_tokens, step.num_accepted_tokens) == (5, 2)
    assert step.accepted_at == (1, 1)
    assert step.draft_lengths == (3, 2, 0)
    assert step.drafted_by_source == {DraftSource.MODEL: 3, DraftSource.NGRAM: 2}
    assert step.accepted_by_source == {DraftSource.MODEL: 2, DraftSource.NGRAM: 0}
    assert step.drafts_by_source == {DraftSource.MODEL: 1, DraftSource.NGRAM: 1}
    assert step.host_s == pytest.approx(0.2)


def test_totals_are_sums_and_rates_are_of_the_sums():
    total = StatsTotal()
    assert (total.acceptance_rate, total.acceptance_length) == (0, 1)
    total.add(example())
    total.add(example())
    assert (total.num_steps, total.num_emitted, total.num_rows) == (2, 10, 16)
    assert total.acceptance_rate == pytest.approx(4 / 10)
    assert total.acceptance_length == pytest.approx(1 + 4 / 4)
    assert total.accepted_at == {0: 2, 1: 2}
    assert total.drafted_by_source == {DraftSource.MODEL: 6, DraftSource.NGRAM: 4}
    assert total.acceptance_length_by_source == {DraftSource.MODEL: 3, DraftSource.NGRAM: 1}
    assert total.verify_s == pytest.approx(1.0)


def test_granted_lengths_stand_beside_the_drafted_ones_of_requests_that_sampled():
    works = [work(DraftChoice(DraftSource.MODEL, num_model_drafts=3)), work(None), reading()]
    wished = {
        "a": DraftChoice(DraftSource.MODEL, num_model_drafts=7),
        "b": DraftChoice(DraftSource.NGRAM, Draft.chain([1, 2])),  # memory left nothing of it
    }
    results = [WorkResult((5, 6), (0,), (5, 9)), WorkResult((4,)), WorkResult()]
    booked = booked_of(works, results)
    result = StepResult(tuple(results), 9)
    step = step_stats(booked, result, granted=wished, step_s=1.0, num_waiting=0, kv_usage=0.5)
    assert step.granted_lengths == (7, 2)
    assert step.draft_lengths == (2, 0)  # the live rule ended the chain before
    assert step.draft_levels == ((DraftSource.MODEL, 2, 1),)
    assert step.step_s == pytest.approx(1.0)


def test_a_tree_has_as_many_levels_as_its_longest_path():
    tree = Draft((1, 2, 3, 4), (0, 0, 1, 3))
    one, outcome = (
        work(DraftChoice(DraftSource.SUFFIX, tree)),
        WorkResult((1, 3, 8), (0, 2), tree.token_ids, tree.parents),
    )
    booked, result = booked_of([one], [outcome]), StepResult((outcome,), 5)
    step = step_stats(booked, result, step_s=1.0, num_waiting=0, kv_usage=0.5)
    assert step.draft_levels == ((DraftSource.SUFFIX, 3, 2),)
    assert step.draft_lengths == (4,)


def reading() -> Work:
    """A chunk of a prompt."""
    return Work(0, 0, 2, False)
