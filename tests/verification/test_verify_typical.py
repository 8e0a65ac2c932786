"""Typical acceptance: the walk is its plain twin's, and it is not exact."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import DraftBatch, row_start_B
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.data.sampling import Paths
from outdraft.kernels.torch import noise
from outdraft.verification.verifier import Verifier
from tests.drafting.lockstep import ALPHA, PLAIN, Decoding, exact_joint, p_value
from tests.kernels.tables import kernels_for
from tests.reference import verification
from tests.sampling_batches import batch_of_params


def random_tree(rng, size, vocab_size):
    tokens = rng.integers(0, vocab_size, size).tolist()
    return Draft(tuple(tokens), tuple(int(rng.integers(0, row + 1)) for row in range(size)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 8), min_size=1, max_size=5),
    st.integers(2, 6),
    st.floats(0.01, 1.0),
    st.floats(0.01, 1.0),
    st.integers(0, 2**32),
)
def test_the_longest_typical_path_is_that_of_a_plain_loop(sizes, vocab_size, eps, delta, seed):
    rng = np.random.default_rng(seed)
    trees = [random_tree(rng, size, vocab_size) for size in sizes]
    drafts = DraftBatch.from_drafts(trees, "cpu")
    logits_RV = torch.from_numpy(2 * rng.normal(size=(sum(sizes) + len(sizes), vocab_size)))
    logits_RV[torch.from_numpy(rng.random(logits_RV.shape) < 0.1)] = -torch.inf
    logits_RV[:, 0] = 1.0
    greedy = rng.random(len(sizes)) < 0.3
    sampling = batch_of_params(
        [SamplingParams(temperature=0.0 if one else 1.0) for one in greedy],
        seeds=range(len(sizes)),
        vocab_size=vocab_size,
        device="cpu",
    )
    tokens_B = torch.arange(5, 5 + len(sizes))
    kernels = kernels_for(torch.float64)
    verdict = Verifier(kernels, "lossy_typical", eps, delta).verify(
        logits_RV, drafts, sampling, Paths(None, tokens_B, tokens_B, None)
    )
    for b, (tree, start) in enumerate(zip(trees, row_start_B(drafts).tolist(), strict=True)):
        rows_NV = logits_RV[start : start + len(tree) + 1]
        if greedy[b]:
            choices = rows_NV.argmax(1).tolist()
            ids, rows = verification.walk(tree.token_ids, tree.parents, choices)
        else:
            p = rows_NV.softmax(1).numpy()
            rows = verification.typical_path(tree.token_ids, tree.parents, p, eps, delta)
            end_V = rows_NV[rows[-1] + 1 if rows else 0]
            keys = NoiseKeys.of(torch.tensor([b]), tokens_B[b : b + 1] + len(rows), Purpose.SAMPLE)
            last = noise.sample_gumbel(end_V[None], keys)
            ids = [*(tree.token_ids[row] for row in rows), int(last)]
        assert verdict.num_emitted_B[b] == len(ids)
        assert verdict.token_ids_BN1[b, : len(ids)].tolist() == ids
        assert verdict.rows_BN[b].tolist() == [*rows, *[-1] * (drafts.width - len(rows))]


def verdict_of(tree, p_NV, bounds):
    """The verdict of one request, with the target's probabilities of all rows."""
    sampling = batch_of_params(
        [SamplingParams()], seeds=[0], vocab_size=p_NV.shape[1], device="cpu"
    )
    one_B = torch.ones(1, dtype=torch.int64)
    drafts = DraftBatch.from_drafts([tree], "cpu")
    paths = Paths(None, one_B, one_B, None)
    verifier = Verifier(kernels_for(p_NV.dtype), "lossy_typical", *bounds)
    return verifier.verify(p_NV.log(), drafts, sampling, paths)


def test_a_draft_is_kept_above_the_threshold_of_its_row():
    """In an even row the bound by entropy is alpha / V; in a peaked one the threshold counts."""
    even_V, peaked_V = torch.full((8,), 1 / 8), torch.tensor([0.91] + [0.09 / 7] * 7)
    tree = Draft.chain((3,))
    for p_V, bounds, want in (
        (even_V, (0.2, 0.9), 1),
        (even_V, (0.12, 1.0), 1),
        (even_V, (0.13, 1.0), 0),
        (peaked_V, (0.09, 0.3), 0),
        (peaked_V, (0.01, 0.3), 1),
    ):
        verdict = verdict_of(tree, torch.stack([p_V, p_V]), bounds)
        assert int((verdict.rows_BN >= 0).sum()) == want


def test_of_equal_paths_the_likelier_is_taken_and_then_the_first():
    p_NV = torch.tensor([[0.3, 0.4, 0.3]]).expand(4, 3)
    anything = (0.01, 0.01)
    for tokens, want in (((0, 1, 2), 1), ((0, 2, 0), 0), ((2, 0, 2), 0)):
        verdict = verdict_of(Draft(tokens, (0, 0, 0)), p_NV, anything)
        assert verdict.rows_BN[0, 0] == want


@pytest.mark.slow
def test_typical_acceptance_is_not_exact_and_accepts_more():
    rates = {}
    for method in ("block", "lossy_typical"):
        decoding = Decoding(PLAIN, 10_000, method)
        ids_BL = decoding.run(lambda one: one.sampled_chains(3))
        rates[method] = decoding.num_accepted / decoding.num_drafts
        is_exact = p_value(ids_BL, exact_joint(PLAIN)) > ALPHA
        assert is_exact == (method == "block")
    assert rates["block"] < rates["lossy_typical"]
