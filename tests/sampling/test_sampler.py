import numpy as np
import pytest
import torch
from scipy import stats

from outdraft.sampling.logprobs import gather_logprobs
from outdraft.sampling.noise import Purpose
from outdraft.sampling.sampler import choose, sample_with_probs


def pick(processed_RV, greedy, purpose=Purpose.SAMPLE, **options):
    rows_R = torch.arange(len(processed_RV))
    is_greedy_R = torch.tensor(greedy)
    return choose(
        processed_RV, rows_R, rows_R, is_greedy_R, purpose, all_greedy=all(greedy), **options
    )


def test_greedy_rows_take_the_lowest_id_of_a_tie():
    logits_RV = torch.tensor([[0.0, 2, 1, 2], [3.0, 3, 3, 3]])
    assert pick(logits_RV, [True, True]).tolist() == [1, 0]


def test_greedy_rows_get_no_noise_beside_sampled_ones():
    logits_RV = torch.tensor([[0.0, 0, 1e-6, 0]]).repeat(400, 1)
    ids_R = pick(logits_RV, [row % 2 == 0 for row in range(400)])
    assert set(ids_R[::2].tolist()) == {2}
    assert set(ids_R[1::2].tolist()) == {0, 1, 2, 3}


def test_samples_follow_the_softmax_and_never_leave_its_support():
    logits_V = torch.tensor([0.5, -torch.inf, 2.0, 0.0, -1.0, -torch.inf, 1.0])
    ids_R = pick(logits_V.repeat(60_000, 1), [False] * 60_000)
    counts_V = np.bincount(ids_R.numpy(), minlength=7)
    want_V = logits_V.softmax(0).double().numpy()
    live = want_V > 0
    assert counts_V[~live].sum() == 0
    want = want_V[live] / want_V[live].sum() * 60_000
    assert stats.chisquare(counts_V[live], want).pvalue > 1e-6


def test_draft_noise_without_anchors_is_refused():
    with pytest.raises(ValueError, match="anchors"):
        pick(torch.zeros(1, 4), [False], Purpose.DRAFT)


def test_drafts_come_with_the_distribution_they_were_drawn_from():
    logits_RV = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))
    rows_R, is_greedy_R = torch.arange(5), torch.zeros(5, dtype=torch.bool)
    ids_R, probs_RV = sample_with_probs(
        logits_RV, rows_R, rows_R, is_greedy_R, Purpose.DRAFT, all_greedy=False, anchors_R=rows_R
    )
    torch.testing.assert_close(probs_RV, logits_RV.softmax(1), rtol=1e-6, atol=0)
    assert torch.equal(ids_R, pick(logits_RV, [False] * 5, Purpose.DRAFT, anchors_R=rows_R))


def test_logprobs_are_the_raw_log_softmax_with_ranks():
    logits_RV = torch.randn(6, 11, generator=torch.Generator().manual_seed(1))
    chosen_R = torch.tensor([0, 3, 10, 5, 5, 1])
    logprob_R, rank_R, ids_RK, top_RK = gather_logprobs(logits_RV, chosen_R, 4)
    want_RV = logits_RV.log_softmax(1)
    for row, chosen in enumerate(chosen_R.tolist()):
        order = sorted(range(11), key=lambda v, row=row: -float(want_RV[row, v]))
        assert rank_R[row] == order.index(chosen) + 1
        assert ids_RK[row].tolist() == order[:4]
        torch.testing.assert_close(logprob_R[row], want_RV[row, chosen])
        torch.testing.assert_close(top_RK[row], want_RV[row, order[:4]])


def test_tied_tokens_share_the_better_rank_and_no_top_is_empty():
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    _, rank_R, ids_RK, top_RK = gather_logprobs(logits_RV, torch.tensor([2]), 0)
    assert rank_R.tolist() == [1]
    assert ids_RK.shape == top_RK.shape == (1, 0)
