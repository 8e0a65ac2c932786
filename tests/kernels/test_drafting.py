"""Growing trees: each library places and draws their levels as the reference does."""

from dataclasses import replace

import numpy as np
import torch
from hypothesis import assume
from hypothesis import strategies as st

from outdraft.core.draft import MAX_DRAFTS, TreeShape
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.grower import KnownLevels, grow
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import DraftStart, Growth, LevelTask, StopRules
from outdraft.kernels.ops import Kernels
from tests.kernels.comparisons import Case
from tests.sampling_batches import batch_of_params

MOST_CONTEXT = 40


def compare_place_level(case: Case) -> None:
    draw, rng = case.data.draw, case.rng()
    block_size = draw(st.sampled_from([1, 4, 16]), "block size")
    num_requests, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    first_row = draw(st.integers(0, MAX_DRAFTS - width), "first row")
    num_blocks = (MOST_CONTEXT + MAX_DRAFTS) // block_size + 1
    ancestors_BF = torch.tensor(rng.integers(0, 2**62, (num_requests, width)))
    contexts_B = torch.tensor(rng.integers(1, MOST_CONTEXT, num_requests))
    num_drafts_B = torch.tensor(rng.integers(1, MAX_DRAFTS + 1, num_requests))
    table_BP = torch.tensor(rng.integers(0, 99, (num_requests, num_blocks))).int()
    states_BD = torch.empty(num_requests, 0)  # the place of a level depends on no state
    start = DraftStart(states_BD, [], contexts_B, table_BP, block_size, MOST_CONTEXT + MAX_DRAFTS)
    level = (ancestors_BF, first_row, num_drafts_B, start)
    got, want = (one.place_level(*level) for one in (case.kernels, case.reference))
    for ours, theirs in zip(got, want, strict=True):
        assert ours.dtype is theirs.dtype
        assert ours.is_contiguous()
        assert torch.equal(ours, theirs)


def compare_draw_level(case: Case) -> None:
    rng = case.rng()
    num_requests, num_nodes, size = 5, int(rng.integers(1, 4)), 60
    num_rows = int(rng.integers(1, 9))
    if case.data.draw(st.booleans(), "is a chain"):
        num_nodes = num_rows = 1
    logits_BEV = torch.tensor(rng.normal(0, 2, (num_requests, num_nodes, size))).float()
    most_with_mass = case.data.draw(st.sampled_from([1, 3, size]), "most tokens with mass")
    num_with_mass_BE1 = rng.integers(1, most_with_mass + 1, (num_requests, num_nodes, 1))
    places_BEV = rng.permuted(np.broadcast_to(np.arange(size), logits_BEV.shape), axis=2)
    logits_BEV[torch.tensor(places_BEV >= num_with_mass_BE1)] = -torch.inf
    weight_BE = torch.tensor(rng.random((num_requests, num_nodes))).float()
    task = LevelTask(
        num_rows=num_rows,
        num_kept_B=torch.tensor(rng.integers(-1, num_rows + 2, num_requests)),
        first_above=4,
        positions_B=torch.tensor(rng.integers(1, 1000, num_requests)),
        num_tokens_B=torch.tensor(rng.integers(1, 1000, num_requests)),
        seeds_B=torch.tensor(rng.integers(0, 2**60, num_requests)),
        draws_B=torch.tensor(rng.random(num_requests) < 0.8),
    )
    ours, theirs = (
        one.draw_level(logits_BEV, weight_BE, task) for one in (case.kernels, case.reference)
    )
    for b in task.draws_B.nonzero()[:, 0].tolist():
        num_kept = max(0, min(int(task.num_kept_B[b]), num_rows))
        is_drawn_F = theirs.is_drawn_BF[b]
        assert torch.equal(ours.origins_BF[b], theirs.origins_BF[b])
        assert torch.equal(ours.is_drawn_BF[b], is_drawn_F)
        assert torch.equal(ours.token_ids_BF[b, :num_kept], theirs.token_ids_BF[b, :num_kept])
        assert torch.equal(ours.weight_BF[b] > 0, is_drawn_F)
        torch.testing.assert_close(ours.weight_BF[b], theirs.weight_BF[b], rtol=1e-4, atol=1e-6)
        probs = ours.probs_BFV[b, is_drawn_F], theirs.probs_BFV[b, is_drawn_F]
        torch.testing.assert_close(*probs)


def stop_rules(case: Case, num_requests: int, depth: int) -> StopRules:
    """Rules of some requests, which end some of them early."""
    rng = case.rng()
    row_cap, num_rows_before = (
        int(rng.integers(1, num_requests * depth + 3)),
        int(rng.integers(0, 3)),
    )
    return StopRules(
        weights_BL=torch.tensor(rng.normal(0, 1, (num_requests, depth))),
        biases_BL=torch.tensor(rng.normal(1, 1, (num_requests, depth))),
        price_B=torch.tensor(rng.choice([0.0, 0.1, 0.3, 0.6], num_requests)),
        has_rule_B=torch.tensor(rng.random(num_requests) < 0.7),
        room_1=torch.tensor([row_cap - num_rows_before]),
    )


def compare_stops(rules: StopRules, ours: DraftBatch, theirs: DraftBatch) -> None:
    """The same lengths, where no survival is so near to the price that rounding may decide."""
    assert ours.margins_BL is not None
    assert theirs.margins_BL is not None
    margins_BL = theirs.margins_BL
    levels = slice(margins_BL.shape[1])
    scores_BL = rules.weights_BL[:, levels] * margins_BL + rules.biases_BL[:, levels]
    survivals_BL = scores_BL.sigmoid().cumprod(1)  # NaN where the rule did not look
    assume(not ((survivals_BL - rules.price_B[:, None]).abs() < 1e-6).any())
    assert torch.equal(ours.num_drafts_B, theirs.num_drafts_B)
    assert ours.margins_BL[:, margins_BL.shape[1] :].isnan().all()
    # Each subtracts the best logit and divides by the temperature: two roundings by half an eps.
    rounding = {"rtol": 2 * torch.finfo(torch.float32).eps, "atol": 0}
    torch.testing.assert_close(ours.margins_BL[:, levels], margins_BL, equal_nan=True, **rounding)


def compare_grow(case: Case) -> None:
    """Requests that are greedy, that draw, and that share their noise, in one batch, some of them
    with live rules if they draft chains."""
    rng, size = case.rng(), 40
    shape = TreeShape(case.data.draw(st.sampled_from([(1,), (1,) * 4, (3,), (2, 4, 3)]), "levels"))
    params = [
        SamplingParams(temperature=temperature, seed=seed)
        for temperature, seed in ((0, None), (0.8, None), (1.5, None), (1, 7))
    ]
    seeds = rng.integers(0, 2**60, len(params)).tolist()
    sampling = batch_of_params(params, seeds=seeds, vocab_size=size, device="cpu")
    num_tokens_B = torch.tensor(rng.integers(1, 1000, len(params)))
    num_drafts_B = torch.tensor(rng.integers(1, shape.num_rows + 1, len(params)))
    levels = KnownLevels(torch.tensor(rng.normal(0, 2, (len(params), shape.depth, size))).float())

    def grown(kernels: Kernels) -> DraftBatch:
        fewest = int(num_drafts_B.min())
        counts = num_tokens_B, num_drafts_B
        growth = Growth(kernels, shape, *counts, fewest, sampling, samples=True, stops=rules)
        return kernels.grow(levels, growth, grow)

    rules = None
    if shape.is_chain and case.data.draw(st.booleans(), "has rules"):
        rules = stop_rules(case, len(params), shape.depth)
    ours, theirs = grown(case.kernels), grown(case.reference)
    if rules is not None:
        compare_stops(rules, ours, theirs)
        ours = without_last_levels(ours, theirs.token_ids_BN.shape[1])
    assert torch.equal(ours.token_ids_BN, theirs.token_ids_BN)
    is_draft_BK = theirs.token_ids_BN >= 0
    assert torch.equal(is_draft_BK.sum(1), theirs.num_drafts_B)
    assert torch.equal(ours.parents_BN[is_draft_BK], theirs.parents_BN[is_draft_BK])
    assert ours.is_sampled_BN is not None
    assert theirs.is_sampled_BN is not None
    is_drawn_BK = theirs.is_sampled_BN & is_draft_BK
    assert torch.equal(ours.is_sampled_BN & is_draft_BK, is_drawn_BK)
    assert ours.probs_BNV is not None
    assert theirs.probs_BNV is not None
    torch.testing.assert_close(ours.probs_BNV[is_drawn_BK], theirs.probs_BNV[is_drawn_BK])


def without_last_levels(chains: DraftBatch, num_levels: int) -> DraftBatch:
    """Without levels that no request has."""
    assert chains.probs_BNV is not None
    assert chains.is_sampled_BN is not None
    assert (chains.token_ids_BN[:, num_levels:] == -1).all()
    return replace(
        chains,
        token_ids_BN=chains.token_ids_BN[:, :num_levels],
        parents_BN=chains.parents_BN[:, :num_levels],
        probs_BNV=chains.probs_BNV[:, :num_levels],
        is_sampled_BN=chains.is_sampled_BN[:, :num_levels],
    )


COMPARISONS = {
    "place_level": compare_place_level,
    "draw_level": compare_draw_level,
    "grow": compare_grow,
}
