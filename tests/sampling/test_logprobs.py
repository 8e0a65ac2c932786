import pytest
import torch

from outdraft.sampling.logprobs import SCORED_LOGITS, gather_in_slices, gather_logprobs


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


@pytest.mark.parametrize("num_top", [0, 1, 2, 5, 40, 299, 300, 301])
@pytest.mark.parametrize("num_values", [1, 3, 40, 10_000])
def test_of_ties_the_lowest_ids_are_best_however_many_are_asked_for(num_values: int, num_top: int):
    """Else the log-probabilities of a request would hang on how many its neighbours ask for."""
    generator = torch.Generator().manual_seed(num_values)
    logits_RV = torch.randint(num_values, (20, 300), generator=generator).float()
    logits_RV[-1] = torch.nan
    want = logits_RV.sort(dim=1, descending=True, stable=True)
    chosen_R = logits_RV.argmax(1)
    logprob_R, _, ids_RK, top_RK = gather_logprobs(logits_RV, chosen_R, num_top)
    assert torch.equal(ids_RK[:-1], want.indices[:-1, :num_top])
    assert torch.equal(top_RK[:-1], (want.values - logits_RV.logsumexp(1, True))[:-1, :num_top])
    if num_top:
        assert torch.equal(ids_RK[:-1, 0], chosen_R[:-1])
        assert torch.equal(top_RK[:-1, 0], logprob_R[:-1])
    assert ((ids_RK >= 0) & (ids_RK < 300)).all()


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5])
def test_slices_of_rows_score_as_all_rows_do(num_rows):
    vocab_size = SCORED_LOGITS // 2  # two rows a slice
    generator = torch.Generator().manual_seed(2)
    logits_RV = torch.randn(num_rows, vocab_size, generator=generator)
    chosen_R = torch.randint(vocab_size, (num_rows,), generator=generator)
    scores = gather_in_slices(logits_RV, chosen_R, 3)
    for score, whole in zip(scores, gather_logprobs(logits_RV, chosen_R, 3), strict=True):
        assert score.dtype is whole.dtype
        assert torch.equal(score, whole)
