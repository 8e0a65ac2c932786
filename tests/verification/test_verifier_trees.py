"""The assembled verifier on trees with sampled drafts: real noise, seeded goodness of fit."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import DraftBatch, path_ids_BN1K
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.data.sampling import Paths
from outdraft.sampling.processors import process_logits
from outdraft.verification.verifier import Verifier
from tests.drafting.lockstep import ALL, ALPHA, PLAIN, PROPOSER, Decoding, exact_joint, p_value
from tests.kernels.tables import draw_tokens, kernels_for
from tests.reference.drafted_trees import without
from tests.reference.verification import total_variation, tree_outcomes
from tests.sampling_batches import batch_of_params

CASES = 100_000


class OneTree:
    """One random tree, the same for all requests, which differ in their seed alone."""

    def __init__(self, seed, vocab_size, size=6):
        rng = np.random.default_rng(seed)
        self.vocab_size = vocab_size
        self.parents = tuple(int(rng.integers(max(0, row - 2), row + 1)) for row in range(size))
        self.p = rng.dirichlet(np.full(vocab_size, 0.4), size + 1).astype(np.float32)
        self.p = np.maximum(self.p, 1e-12)
        q = np.stack([rng.dirichlet(30 * self.p[parent] + 0.02) for parent in self.parents])
        likely = [np.argsort(-q[row])[:2] for row in range(size)]
        self.is_sampled = [bool(rng.random() < 0.7) for _ in self.parents]
        tokens, siblings = [0] * size, {parent: set() for parent in self.parents}
        for row in range(size):
            taken = siblings[self.parents[row]]
            if self.is_sampled[row]:
                q[row] = without(q[row], taken)
                tokens[row] = int(rng.choice(vocab_size, p=q[row]))
            else:
                tokens[row] = next(
                    int(token) for token in [*likely[row], *range(vocab_size)] if token not in taken
                )
            taken.add(tokens[row])
        self.token_ids, self.q = tuple(tokens), q.astype(np.float32)

    def outcomes(self):
        q = [one if drawn else None for one, drawn in zip(self.q, self.is_sampled, strict=True)]
        return tree_outcomes(self.token_ids, self.parents, q, self.p)

    def verdict(self, dtype, seeds):
        """`seeds`: of the requests' noise; float32 is compiled, float64 is not."""
        num = len(seeds)
        one = DraftBatch.from_drafts([Draft(self.token_ids, self.parents)] * num, "cpu")
        is_sampled_N = torch.tensor(self.is_sampled)
        probs_NV = torch.from_numpy(self.q).masked_fill(~is_sampled_N[:, None], torch.nan)
        drafts = replace(
            one,
            is_chain=False,
            probs_BNV=probs_NV.expand(num, -1, -1),
            is_sampled_BN=is_sampled_N.expand(num, -1),
            sampled_trees=True,
        )
        sampling = batch_of_params(
            [SamplingParams()] * num, seeds=seeds, vocab_size=self.vocab_size, device="cpu"
        )
        tokens_B = torch.full((num,), 11)
        logits_RV = torch.from_numpy(self.p).log().to(dtype).repeat(num, 1)
        return Verifier(kernels_for(dtype), "block").verify(
            logits_RV, drafts, sampling, Paths(None, tokens_B, tokens_B, None)
        )


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "tensors"])
@pytest.mark.parametrize(("seed", "vocab_size"), [(0, 8), (1, 32), (2, 16)])
def test_accepted_lengths_and_tokens_of_a_tree_fit_the_rule(seed, vocab_size, dtype):
    tree = OneTree(seed, vocab_size)
    num = CASES if dtype == torch.float32 else CASES // 5
    ids_BL = tree.verdict(dtype, range(num)).token_ids_BN1
    assert p_value(ids_BL, tree.outcomes()) > ALPHA


@pytest.mark.slow
def test_a_tree_verified_with_other_probabilities_would_be_seen():
    tree = OneTree(0, 8)
    want, right_q = tree.outcomes(), tree.q
    distances = []
    for q in (right_q, right_q**1.5 / (right_q**1.5).sum(1, keepdims=True)):
        tree.q = q
        rows = tree.verdict(torch.float32, range(CASES)).token_ids_BN1.tolist()
        counts = Counter(tuple(token for token in row if token >= 0) for row in rows)
        shares = {ids: count / CASES for ids, count in counts.items()}
        distances.append(total_variation(shares, want))
    assert distances[0] < 0.015 < 0.03 < distances[1]


# Children of the rows (parent, is it sampled): two draws, one, and a deterministic child before
# a draw; two leaves.
LAYOUT = ((0, True), (0, True), (1, True), (2, False), (2, True), (3, True))


def drawn_trees(decoding):
    """Trees of one layout, with deterministic tokens the proposer's best and the others drawn.

    The same noise without the best token gives the second best: draws without replacement.
    """
    num, parents = decoding.num_requests, [parent for parent, _ in LAYOUT]
    layout = Draft((0,) * len(LAYOUT), tuple(parents))
    drafts = DraftBatch.from_drafts([layout] * num, "cpu")
    drafts = replace(drafts, sampled_trees=True)
    probs, marks, depths = [], [], [0]
    children = {}  # row: its tokens so far, which it does not have again
    for at, (parent, is_sampled) in enumerate(LAYOUT):
        depths.append(depths[parent] + 1)
        last_B = drafts.token_ids_BN[:, parent - 1] if parent else decoding.root_B
        path_BK = path_ids_BN1K(drafts)[:, parent]
        processed_BV = process_logits(
            decoding.kernels,
            PROPOSER[last_B],
            torch.arange(num),
            replace(decoding.committed, path_ids_RK=path_BK),
            decoding.sampling,
        )
        for taken_B in children.setdefault(parent, []):
            processed_BV = processed_BV.scatter(1, taken_B[:, None], -torch.inf)
        chosen_B, probs_BV = processed_BV.argmax(1), processed_BV
        is_left_B = processed_BV.amax(1) > -torch.inf
        if is_sampled:
            keys = NoiseKeys.of(
                decoding.sampling.seeds_B,
                decoding.num_tokens_B + depths[parent],
                Purpose.DRAFT,
                decoding.num_tokens_B + (parent << 24),
            )
            drawn_B, probs_BV = draw_tokens(
                decoding.kernels, processed_BV, keys, decoding.sampling.is_greedy_B
            )
            # Where the best token was the only one, there is nothing to draw.
            chosen_B = torch.where(is_left_B, drawn_B, chosen_B)
        children[parent].append(chosen_B)
        token_ids_BN = drafts.token_ids_BN.clone()
        token_ids_BN[:, at] = chosen_B
        drafts = replace(drafts, token_ids_BN=token_ids_BN)
        probs.append(probs_BV)
        marks.append(is_left_B & is_sampled)
    return replace(drafts, probs_BNV=torch.stack(probs, 1), is_sampled_BN=torch.stack(marks, 1))


def ragged_trees(decoding):
    """The first 0 to 6 rows; every fifth request forgets how its drafts came about."""
    drafts = drawn_trees(decoding)
    number_B = torch.arange(decoding.num_requests)
    drafts = replace(
        drafts,
        num_drafts_B=number_B // 5 % 7,
        is_sampled_BN=drafts.is_sampled_BN & (number_B % 5 > 0)[:, None],
    )
    is_draft_BN = drafts.is_draft_BN
    return replace(
        drafts,
        token_ids_BN=torch.where(is_draft_BN, drafts.token_ids_BN, -1),
        probs_BNV=torch.where(
            (is_draft_BN & drafts.is_sampled_BN)[:, :, None], drafts.probs_BNV, torch.nan
        ),
    )


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("params", [PLAIN, ALL], ids=["plain", "all processors"])
@pytest.mark.parametrize("draft", [drawn_trees, ragged_trees], ids=["whole", "ragged"])
def test_output_of_trees_fits_the_target(draft, params):
    decoding = Decoding(params, 20_000)
    assert p_value(decoding.run(draft), exact_joint(params)) > ALPHA


def test_trees_accept_more_with_their_probabilities_than_by_matching():
    rates = {}
    for method in ("block", "drafter_invariant"):
        decoding = Decoding(PLAIN, 5000, method)
        decoding.step(drawn_trees(decoding))
        rates[method] = decoding.num_accepted / decoding.num_requests
    assert rates["drafter_invariant"] + 0.1 < rates["block"]
