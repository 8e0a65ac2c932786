"""Log-probabilities by each table: right, and ties as the lowest ids have them."""

import pytest
import torch
from hypothesis import strategies as st

from outdraft.kernels.choose import choose_kernels, kernels_options
from outdraft.kernels.data.logits import SCORED_LOGITS
from outdraft.kernels.native.library import open_library, usable_instruction_sets
from outdraft.kernels.native.table import native_kernels
from outdraft.kernels.torch.sampling import score_tokens
from tests.kernels.comparisons import Case

CPU = torch.device("cpu")
ROUNDING = 2e-6  # relative, of a sum of exponentials

tables = pytest.mark.parametrize("name", kernels_options())


def table(name):
    return choose_kernels(name, CPU, torch.float32)


def compare_score_tokens(case: Case) -> None:
    draw, rng = case.data.draw, case.rng()
    size, num_rows = draw(st.integers(1, 3000)), draw(st.integers(0, 40))
    num_top = draw(st.sampled_from([0, 1, 3, 20, size]))
    scale = draw(st.sampled_from([0.0, 1.0, 30.0]))
    logits_AV = torch.from_numpy(scale * rng.normal(size=(5, size))).float()
    logits_AV = logits_AV.round() if draw(st.booleans(), "ties") else logits_AV
    masked_AV = torch.from_numpy(rng.random((5, size)) < draw(st.sampled_from([0.0, 0.9])))
    logits_AV = logits_AV.masked_fill(masked_AV, -torch.inf)
    logits_AV[:, rng.integers(size)] = 1.0
    rows_R = torch.from_numpy(rng.integers(0, 5, num_rows))
    if draw(st.booleans(), "all rows in order"):
        rows_R, num_rows = None, 5
    chosen_R = torch.from_numpy(rng.integers(0, size, num_rows))
    got, want = (
        kernels.score_tokens(logits_AV, chosen_R, num_top, rows_R)
        for kernels in (case.kernels, case.reference)
    )
    assert torch.equal(got.ranks_R, want.ranks_R)
    assert torch.equal(got.top_ids_RK, want.top_ids_RK)
    bound = ROUNDING * (1 + logits_AV[logits_AV > -torch.inf].abs().max().item())
    for name in ("logprobs_R", "top_logprobs_RK"):
        scores = getattr(got, name), getattr(want, name)
        torch.testing.assert_close(*scores, rtol=0, atol=bound)


COMPARISONS = {"score_tokens": compare_score_tokens}


@tables
def test_logprobs_are_the_raw_log_softmax_with_ranks(name):
    logits_RV = torch.randn(6, 11, generator=torch.Generator().manual_seed(1))
    chosen_R = torch.tensor([0, 3, 10, 5, 5, 1])
    logprob_R, rank_R, ids_RK, top_RK = table(name).score_tokens(logits_RV, chosen_R, 4)
    want_RV = logits_RV.log_softmax(1)
    for row, chosen in enumerate(chosen_R.tolist()):
        order = sorted(range(11), key=lambda v, row=row: -float(want_RV[row, v]))
        assert rank_R[row] == order.index(chosen) + 1
        assert ids_RK[row].tolist() == order[:4]
        torch.testing.assert_close(logprob_R[row], want_RV[row, chosen])
        torch.testing.assert_close(top_RK[row], want_RV[row, order[:4]])


@tables
def test_tied_tokens_share_the_better_rank_and_no_top_is_empty(name):
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    _, rank_R, ids_RK, top_RK = table(name).score_tokens(logits_RV, torch.tensor([2]), 0)
    assert rank_R.tolist() == [1]
    assert ids_RK.shape == top_RK.shape == (1, 0)


@tables
@pytest.mark.parametrize("num_top", [0, 1, 2, 5, 40, 299, 300, 301])
@pytest.mark.parametrize("num_values", [1, 3, 40, 10_000])
def test_of_ties_the_lowest_ids_are_best_however_many_are_asked_for(name, num_values, num_top):
    """Else the log-probabilities of a request would hang on how many its neighbours ask for."""
    generator = torch.Generator().manual_seed(num_values)
    logits_RV = torch.randint(num_values, (20, 300), generator=generator).float()
    logits_RV[-1] = torch.nan
    want = logits_RV.sort(dim=1, descending=True, stable=True)
    chosen_R = logits_RV.argmax(1)
    logprob_R, _, ids_RK, top_RK = table(name).score_tokens(logits_RV, chosen_R, num_top)
    assert torch.equal(ids_RK[:-1], want.indices[:-1, :num_top])
    torch.testing.assert_close(
        top_RK[:-1], (want.values - logits_RV.logsumexp(1, True))[:-1, :num_top]
    )
    if num_top:
        assert torch.equal(ids_RK[:-1, 0], chosen_R[:-1])
        assert torch.equal(top_RK[:-1, 0], logprob_R[:-1])
    assert ((ids_RK >= 0) & (ids_RK < 300)).all()


@pytest.mark.parametrize("num_rows", [0, 1, 2, 5])
def test_slices_of_rows_score_as_single_rows_do(num_rows):
    vocab_size = SCORED_LOGITS // 2  # two rows a slice
    generator = torch.Generator().manual_seed(2)
    logits_RV = torch.randn(num_rows, vocab_size, generator=generator)
    chosen_R = torch.randint(vocab_size, (num_rows,), generator=generator)
    scores = score_tokens(logits_RV, chosen_R, 3)
    assert all(len(score) == num_rows for score in scores)
    for row in range(num_rows):
        alone = score_tokens(logits_RV, chosen_R[row : row + 1], 3, torch.tensor([row]))
        for score, one in zip(scores, alone, strict=True):
            assert score.dtype is one.dtype
            torch.testing.assert_close(score[row : row + 1], one)


@tables
def test_a_row_scores_the_same_beside_others(name):
    logits_RV = torch.randn(9, 50_000, generator=torch.Generator().manual_seed(3))
    chosen_R = logits_RV.argmin(1)
    whole = table(name).score_tokens(logits_RV, chosen_R, 5)
    for row in range(9):
        alone = table(name).score_tokens(logits_RV, chosen_R[row : row + 1], 5, torch.tensor([row]))
        for score, one in zip(whole, alone, strict=True):
            assert torch.equal(score[row : row + 1], one)


@tables
def test_no_rows_have_no_scores(name):
    """A rank scores its part of few rows, which may be none."""
    none_R = torch.zeros(0, dtype=torch.int64)
    scores = table(name).score_tokens(torch.zeros(0, 30), none_R, 2)
    assert [list(part.shape) for part in scores] == [[0], [0], [0, 2], [0, 2]]


@pytest.mark.parametrize("name", usable_instruction_sets())
def test_threads_score_tokens_as_one_does(name):
    alone, shared = (native_kernels(open_library(name), count) for count in (1, 4))
    logits_RV = torch.randn(35, 9001, generator=torch.Generator().manual_seed(3))
    rows_R, chosen_R = torch.arange(35).flip(0), logits_RV.argmax(1)
    want = alone.score_tokens(logits_RV, chosen_R, 6, rows_R)
    for _ in range(20):
        got = shared.score_tokens(logits_RV, chosen_R, 6, rows_R)
        assert all(map(torch.equal, got, want))
