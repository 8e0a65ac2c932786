"""Verification as graphs of rounded numbers of requests and rows: verdicts as launch by launch.

What stands for a graph repeats the launches.
"""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.kernels.data.drafts import DraftBatch, Rule
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels
from tests.kernels.test_verification import KINDS, Step, rows_of, same

pytest.importorskip("triton", reason="needs triton")
from outdraft.kernels.triton.graphed import GraphedVerification


class Again:
    """It counts what it made."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self, launch):
        self.num_made += 1
        return launch, launch()


@dataclass(frozen=True)
class Chosen:
    """By the rows themselves."""

    kernels: Kernels
    rule: Rule

    def __call__(self, logits_RV, drafts, sampling, num_tokens_B):
        verdict = self.kernels.verify(logits_RV, drafts, sampling, num_tokens_B, self.rule)
        return verdict, self.kernels.finite_rows(logits_RV)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    kind=st.sampled_from(sorted(KINDS)),
    sizes=st.lists(st.integers(1, 11), min_size=2, max_size=3),
)
def test_verdicts_are_those_of_the_reference(seed, kind, sizes):
    (rule, sampled_trees), rng = KINDS[kind], np.random.default_rng(seed)
    reference = reference_kernels()
    graphed = GraphedVerification(reference, capture := Again())
    steps = [Step(rng, size, most=4, vocab_size=23, sampled_trees=sampled_trees) for size in sizes]
    kernels = replace(reference, verify=graphed.verify)
    for step in steps * 3:
        got = step.verdicts(kernels, rule, torch.float32)
        # A sum over more rows may be rounded otherwise.
        allowed = step.allowed(reference, rule)
        assert all(one in ones for one, ones in zip(got, allowed, strict=True))
    assert 1 <= capture.num_made <= len(sizes)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    seed=st.integers(0, 1 << 30),
    kind=st.sampled_from(sorted(KINDS)),
    sizes=st.lists(st.integers(1, 11), min_size=2, max_size=3),
)
def test_what_is_chosen_at_once_is_what_its_parts_choose(seed, kind, sizes):
    """The states are logits here; what verifies inside makes no graphs of its own."""
    (rule, sampled_trees), rng = KINDS[kind], np.random.default_rng(seed)
    reference = reference_kernels()
    graphed = GraphedVerification(reference, capture := Again())
    kernels = replace(reference, verify=graphed.verify, choose=graphed.choose)
    steps = [Step(rng, size, most=4, vocab_size=23, sampled_trees=sampled_trees) for size in sizes]
    choosing = Chosen(kernels, rule)
    for step in steps * 3:
        arguments = step.logits_RV, step.drafts, step.sampling, step.num_tokens_B
        verdict, is_finite_R = kernels.choose(choosing, *arguments)
        allowed = step.allowed(reference, rule)
        got = rows_of(verdict)
        assert all(one in ones for one, ones in zip(got, allowed, strict=True))
        assert torch.equal(is_finite_R, reference.finite_rows(step.logits_RV))
    assert 1 <= capture.num_made <= len(sizes)
    assert not graphed._verdicts._graphs


@pytest.mark.slow
def test_plain_steps_of_few_more_requests_share_a_graph():
    reference, rng = reference_kernels(), np.random.default_rng(0)
    graphed = GraphedVerification(reference, capture := Again())
    for number in (9, 16, 12, 13):
        drafts = DraftBatch.empty(number, "cpu")
        step = Step(rng, number, most=0, vocab_size=9)
        arguments = step.logits_RV, drafts, step.sampling, step.num_tokens_B, Rule.TRAVERSAL
        assert same(graphed.verify(*arguments), reference.verify(*arguments))
    assert capture.num_made <= 2  # Step draws which requests are greedy, or have a seed
