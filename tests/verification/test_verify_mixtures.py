"""The rules of one batch by enumeration: requests with a seed beside requests without one.

The assembled verifier is the rule that is enumerated (see `enumeration`). Every request stands
beside a copy of itself that brings a seed, and is matched: what the one emits has the target's own
joint distribution, what the other emits is the path of the target's choices, whatever was drafted.
"""

import itertools
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch

from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import Verdict
from outdraft.kernels.data.sampling import Paths
from outdraft.kernels.torch import noise, verification
from outdraft.verification.verifier import Verifier
from tests.kernels.tables import kernels_for
from tests.reference.drafted_trees import as_batch, every_tree, target_rows
from tests.sampling_batches import batch_of_params
from tests.verification.enumeration import (
    KINDS,
    V,
    bias,
    chains_emit,
    random_model,
    repeated,
    trees_emit,
)
from tests.verification.test_verify_exact import every_chain

SHAPES = {
    "chains": lambda prefix: ((), int(len(prefix) < 2)),
    "two chains": lambda prefix: ((), (2, 1, 0)[len(prefix)]),
    "fixed and drawn": lambda prefix: ((0,), 1) if len(prefix) < 1 else ((), int(len(prefix) < 2)),
}


def trees_of(shape, proposer):
    return list(every_tree(lambda prefix, _: SHAPES[shape](prefix), proposer))


@contextmanager
def scripted(coins_BN, draw, choices_R):
    """The verifier's noise, told beforehand."""
    with (
        patch.object(noise, "uniform_scalar", lambda _: coins_BN.flatten()),
        patch.object(noise, "sample_gumbel", lambda log_BV, *_: draw(log_BV)),
        patch.object(verification, "choose", lambda *_: choices_R),
    ):
        yield


def verify_pairs(method, logits_RV, drafts, coins_BN, draw, choices_R=None):
    """(verdicts without a seed, verdicts with one) of requests that stand side by side."""
    pair_C = torch.arange(drafts.num_requests).repeat_interleave(2)
    pairs, rows_RV = repeated(drafts, logits_RV, pair_C)
    params = [SamplingParams(), SamplingParams(seed=5)] * drafts.num_requests
    sampling = batch_of_params(params, seeds=range(len(params)), vocab_size=V, device="cpu")
    lengths_C = torch.ones_like(pair_C)
    if choices_R is None:  # nobody looks at those of the others
        choices_R = torch.zeros(len(rows_RV), dtype=torch.int64)
    with scripted(coins_BN[pair_C], lambda log_CV: draw(log_CV[::2])[pair_C], choices_R):
        verdict = Verifier(kernels_for(torch.float64), method).verify(
            rows_RV, pairs, sampling, Paths(None, lengths_C, lengths_C, None)
        )
    tensors = (verdict.token_ids_BN1, verdict.num_emitted_B, verdict.rows_BN)
    return [Verdict(*(tensor[first::2] for tensor in tensors)) for first in (0, 1)]


def without_seed(method):
    """The rule that a method has for the requests without a seed."""

    def rule(logits_RV, drafts, coins_BN, script):
        unseeded, _ = verify_pairs(
            method, logits_RV, drafts, coins_BN, lambda log_BV: script(log_BV, None, None)
        )
        return unseeded

    return rule


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["block", "token"])
def test_chains_without_a_seed_are_exact_beside_requests_with_one(method, seed):
    target, proposer = random_model(seed)
    emitted = chains_emit(without_seed(method), *every_chain(target, proposer, 2))
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    assert bias(emitted, target) < 1e-12


@pytest.mark.parametrize("kinds", [KINDS, ("plain",)], ids=len)
@pytest.mark.parametrize("shape", SHAPES)
def test_trees_without_a_seed_are_exact_beside_requests_with_one(shape, kinds):
    target, proposer = random_model(1, kinds)

    emitted = trees_emit(without_seed("block"), trees_of(shape, proposer), target)
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-12)
    assert bias(emitted, target) < 1e-12


@pytest.mark.parametrize("shape", SHAPES)
def test_requests_with_a_seed_emit_the_path_of_the_targets_choices(shape):
    """Under all choices, coins against the drafts and for them; so they have its distribution."""
    target, proposer = random_model(2, ("plain",))
    for tree in trees_of(shape, proposer):
        every = torch.tensor(list(itertools.product(range(V), repeat=len(tree) + 1)))
        batch, rows_RV = repeated(
            as_batch([tree], V), target_rows([tree], target), torch.zeros(len(every)).long()
        )
        coins_BN = (torch.arange(len(every)) % 2).double()[:, None].expand(-1, len(tree))
        _, seeded = verify_pairs(
            "block",
            rows_RV,
            batch,
            coins_BN,
            lambda log_BV: torch.zeros(len(log_BV), dtype=torch.int64),
            every.repeat_interleave(2, dim=0).flatten(),
        )
        for choices, ids, count in zip(
            every.tolist(),
            seeded.token_ids_BN1.tolist(),
            seeded.num_emitted_B.tolist(),
            strict=True,
        ):
            assert ids[:count] == path_of(tree, choices)


def path_of(tree, choices):
    """The choice behind the root, and behind each draft that it meets."""
    row, path = 0, [choices[0]]
    children = {
        pair: at for at, pair in enumerate(zip(tree.parents, tree.token_ids, strict=True), 1)
    }
    while (row, path[-1]) in children:
        row = children[row, path[-1]]
        path.append(choices[row])
    return path
