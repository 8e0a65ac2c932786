"""Verdicts and matched paths by each table: those of the reference, as far as float32 can tell."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.data.drafts import DraftBatch, Rule, row_index_BN1
from outdraft.kernels.native.library import usable_instruction_sets
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch import noise
from tests.kernels.comparisons import Case
from tests.sampling_batches import batch_of_params


@st.composite
def batches(draw):
    """Trees or chains of a few tokens, and choices behind all rows."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    sizes, chains = draw(st.lists(st.integers(0, 12), min_size=1, max_size=5)), draw(st.booleans())
    drafts = []
    for size in sizes:
        tokens = rng.integers(0, 3, size).tolist()
        parents = range(size) if chains else [int(rng.integers(0, row + 1)) for row in range(size)]
        drafts.append(Draft(tuple(tokens), tuple(parents)))
    num_rows = sum(sizes) + len(sizes) + draw(st.integers(0, 3))
    return DraftBatch.from_drafts(drafts, "cpu"), torch.from_numpy(rng.integers(0, 3, num_rows))


def same(got, want):
    return all(
        torch.equal(getattr(got, name), getattr(want, name))
        for name in ("token_ids_BN1", "num_emitted_B", "rows_BN")
    )


def compare_match(case: Case) -> None:
    drafts, choices_R = case.data.draw(batches())
    assert same(case.kernels.match(choices_R, drafts), case.reference.match(choices_R, drafts))


class Step:
    """A random step of sampled and greedy requests, with drafts of every kind.

    Requests have deterministic trees, or drafts of which some or all rows are sampled: chains or
    trees.
    """

    def __init__(self, rng, num_requests, most, vocab_size, num_padding=0, sampled_trees=False):
        self.rng, self.vocab_size = rng, vocab_size
        sizes = rng.integers(0, most + 1, num_requests)
        has_probs_B = rng.random(num_requests) < 0.7
        trees = [
            self._tree(n, has_probs and not sampled_trees)
            for n, has_probs in zip(sizes, has_probs_B, strict=True)
        ]
        drafts = DraftBatch.from_drafts(trees, "cpu")
        self.logits_RV = self._logits(len(sizes) + sizes.sum() + num_padding)
        is_sampled_BN = self._sampled(drafts, has_probs_B)
        probs_BNV, token_ids_BN = self._drawn(drafts, is_sampled_BN)
        self.drafts = replace(
            drafts,
            token_ids_BN=token_ids_BN,
            # What nobody may read: the padding, and what belongs to deterministic drafts.
            probs_BNV=probs_BNV.masked_fill(~is_sampled_BN[:, :, None], torch.nan),
            is_sampled_BN=is_sampled_BN | ~drafts.is_draft_BN if is_sampled_BN.any() else None,
            sampled_trees=sampled_trees,
        )
        self.sampling = batch_of_params(
            [
                SamplingParams(
                    temperature=0.0 if rng.random() < 0.2 else 1.0,
                    seed=0 if rng.random() < 0.2 else None,  # matched beside others
                )
                for _ in range(num_requests)
            ],
            seeds=rng.integers(0, 2**62, num_requests).tolist(),
            vocab_size=vocab_size,
            device="cpu",
        )
        self.num_tokens_B = torch.from_numpy(rng.integers(1, 5000, num_requests))

    def _tree(self, size, is_chain):
        tokens = tuple(self.rng.integers(0, self.vocab_size, size).tolist())
        parents = [row if is_chain else int(self.rng.integers(0, row + 1)) for row in range(size)]
        return Draft(tokens, tuple(parents))

    def _logits(self, num_rows):
        """With masked tokens, ties and one-hot rows among them."""
        x_RV = 1.5 * self.rng.normal(size=(num_rows, self.vocab_size))
        x_RV[self.rng.random(x_RV.shape) < 0.1] = -np.inf
        x_RV[np.arange(num_rows), self.rng.integers(0, self.vocab_size, num_rows)] = 1.0
        x_RV[self.rng.random(num_rows) < 0.1] *= 10
        return torch.from_numpy(np.where(np.isnan(x_RV), -np.inf, x_RV)).float()

    def _sampled(self, drafts, has_probs_B):
        """Which drafts are: all of a request's as far as they may be, or some."""
        share_B1 = self.rng.choice([0.5, 1.0], (drafts.num_requests, 1))
        is_sampled_BN = self.rng.random(drafts.token_ids_BN.shape) < share_B1
        is_sampled_BN &= drafts.is_draft_BN.numpy() & has_probs_B[:, None]
        return torch.from_numpy(is_sampled_BN)

    def _drawn(self, drafts, is_sampled_BN):
        """What drafts are drawn from, without their deterministic siblings, and the tokens with
        those drawn."""
        target_BNV = self._target(drafts)
        probs_BNV = self._probs(target_BNV)
        parents_BN, ids_BN = drafts.parents_BN, drafts.token_ids_BN
        is_fixed_BN = drafts.is_draft_BN & ~is_sampled_BN
        is_fixed_BNN = is_fixed_BN[:, None, :] & (parents_BN[:, :, None] == parents_BN[:, None, :])
        ids_BNN = ids_BN.clamp(min=0)[:, None, :].expand_as(is_fixed_BNN)
        counts_BNV = torch.zeros_like(probs_BNV).scatter_add(2, ids_BNN, is_fixed_BNN.float())
        probs_BNV = probs_BNV.masked_fill(counts_BNV > 0, 0.0)
        total_BN1 = probs_BNV.sum(2, keepdim=True)
        is_sampled_BN &= total_BN1[:, :, 0] > 0
        probs_BNV = torch.where(total_BN1 > 0, probs_BNV / total_BN1, probs_BNV)

        shares_BN1 = torch.from_numpy(self.rng.random((*ids_BN.shape, 1)))
        drawn_BN = (probs_BNV.cumsum(2) < shares_BN1).sum(2).clamp(max=self.vocab_size - 1)
        # Impossible drafts come too, but not where only rounding tells the rows apart, with or
        # without the tokens of deterministic siblings.
        whole_BNV = target_BNV.softmax(2)
        left_BNV = whole_BNV.masked_fill(counts_BNV > 0, 0.0)
        left_BNV /= left_BNV.sum(2, keepdim=True).clamp(min=1e-30)
        is_drawn_BN = (whole_BNV - probs_BNV).abs().sum(2) < 1e-3
        is_drawn_BN |= (left_BNV - probs_BNV).abs().sum(2) < 1e-3
        is_drawn_BN |= torch.from_numpy(self.rng.random(drawn_BN.shape) < 0.8)
        return probs_BNV, torch.where(is_drawn_BN & is_sampled_BN, drawn_BN, ids_BN)

    def _target(self, drafts):
        """Logits of the rows that the drafts come after."""
        rows_BN1 = row_index_BN1(drafts)
        parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 0)
        return self.logits_RV[rows_BN1.gather(1, parents_BN)]

    def _probs(self, target_BNV):
        """Like the target's, some the same; zeros among them."""
        noise_BNV = torch.from_numpy(self.rng.normal(size=target_BNV.shape)).float()
        is_same_B11 = torch.from_numpy(self.rng.random(len(target_BNV)) < 0.2)[:, None, None]
        is_zero_BNV = torch.from_numpy(self.rng.random(target_BNV.shape) < 0.1)
        is_zero_BNV &= target_BNV < target_BNV.amax(2, keepdim=True)
        other_BNV = (target_BNV + noise_BNV).masked_fill(is_zero_BNV, -torch.inf)
        return torch.where(is_same_B11, target_BNV, other_BNV).softmax(2)

    def verdicts(self, kernels: Kernels, rule, dtype):
        """Per request: the emitted ids and the accepted rows."""
        verdict = kernels.verify(
            self.logits_RV.to(dtype), self.drafts, self.sampling, self.num_tokens_B, rule
        )
        return rows_of(verdict)

    def allowed(self, reference: Kernels, rule):
        """Per request all verdicts of the reference in float64, within rounding of float32."""
        found = [set() for _ in range(self.drafts.num_requests)]
        for shift in (-ROUNDING, 0.0, ROUNDING):
            for takes_second in (False, True):
                with (
                    patch.object(noise, "uniform_scalar", shifted(shift)),
                    patch.object(noise, "sample_gumbel", nearly_best(takes_second)),
                ):
                    verdicts = self.verdicts(reference, rule, torch.float64)
                for one, verdict in zip(found, verdicts, strict=True):
                    one.add(verdict)
        return found


def rows_of(verdict):
    """Per request: the emitted ids, the accepted rows, and how many ids there are."""
    ids, rows = verdict.token_ids_BN1.tolist(), verdict.rows_BN.tolist()
    counts = verdict.num_emitted_B.tolist()
    return list(zip(map(tuple, ids), map(tuple, rows), counts, strict=True))


ROUNDING = 1e-5
true_scalar = noise.uniform_scalar


def shifted(shift):
    return lambda keys: true_scalar(keys).double() + shift


def nearly_best(takes_second):
    """Sampling that may take the second best where float32 hardly tells it from the best."""

    def sample(logits_RV, keys, *_):
        keys_RV = logits_RV + noise.gumbel(keys, logits_RV.shape[1])
        best_R2, ids_R2 = keys_RV.topk(2, dim=1)
        is_close_R = best_R2[:, 0] - best_R2[:, 1] < ROUNDING
        return torch.where(is_close_R & takes_second, ids_R2[:, 1], ids_R2[:, 0])

    return sample


KINDS = {
    "chains": (Rule.TRAVERSAL, False),
    "token": (Rule.TOKEN, False),
    "trees": (Rule.TRAVERSAL, True),
    "token, trees": (Rule.TOKEN, True),
    "matched": (Rule.MATCH, True),
}


def compare_verify(case: Case) -> None:
    rule, sampled_trees = KINDS[case.data.draw(st.sampled_from(sorted(KINDS)), "kind")]
    num_requests, most = case.data.draw(st.integers(1, 4)), case.data.draw(st.integers(0, 6))
    vocab_size = case.data.draw(st.integers(2, 40))
    step = Step(case.rng(), num_requests, most, vocab_size, most % 3, sampled_trees)
    got = step.verdicts(case.kernels, rule, torch.float32)
    allowed = step.allowed(case.reference, rule)
    assert all(one in ones for one, ones in zip(got, allowed, strict=True))


COMPARISONS = {
    "match": compare_match,
    "verify": compare_verify,
}

kinds = pytest.mark.parametrize(("rule", "sampled_trees"), KINDS.values(), ids=KINDS)
REFERENCE = choose_kernels("reference", torch.device("cpu"), torch.float32)


@kinds
@pytest.mark.parametrize("vocab_size", [2, 9, 600])
def test_verdicts_of_many_requests_are_those_of_the_reference(rule, sampled_trees, vocab_size):
    num_requests = 2000 if vocab_size < 100 else 150
    rng = np.random.default_rng(vocab_size)
    step = Step(rng, num_requests, 6, vocab_size, num_padding=2, sampled_trees=sampled_trees)
    allowed = step.allowed(REFERENCE, rule)
    assert sum(len(one) > 1 for one in allowed) < 0.005 * num_requests
    for name in usable_instruction_sets():
        kernels = choose_kernels(name, torch.device("cpu"), torch.float32)
        got = step.verdicts(kernels, rule, torch.float32)
        assert [b for b, verdict in enumerate(got) if verdict not in allowed[b]] == []


@kinds
def test_a_wrong_coin_would_be_seen(rule, sampled_trees):
    """A negative control: noise of other keys gives verdicts that the comparison refuses."""
    step = Step(np.random.default_rng(1), 300, 4, 9, sampled_trees=sampled_trees)
    got = step.verdicts(REFERENCE, rule, torch.float32)
    step.num_tokens_B = step.num_tokens_B + 1
    allowed = step.allowed(REFERENCE, rule)
    assert sum(one not in ones for one, ones in zip(got, allowed, strict=True)) > 30


def test_trees_of_sampled_drafts_branch_and_are_accepted():
    """What the comparison of trees compares."""
    step = Step(np.random.default_rng(2), 1000, 6, 9, sampled_trees=True)
    verdicts = step.verdicts(REFERENCE, Rule.TRAVERSAL, torch.float32)
    rows_BN = torch.tensor([rows for _, rows, _ in verdicts])
    places_N = torch.arange(step.drafts.width)
    is_taken_BN = (rows_BN[:, :, None] == places_N).any(1)
    is_sampled_BN = step.drafts.is_sampled_BN & step.drafts.is_draft_BN
    assert (is_taken_BN & is_sampled_BN).sum() > 200
    assert (is_taken_BN & ~is_sampled_BN & is_sampled_BN.any(1, keepdim=True)).sum() > 20
    assert (rows_BN[:, 1:] > rows_BN[:, :-1] + 1).sum() > 20


def test_the_longest_draft_is_walked_to_its_end():
    """63 drafts, all of them the target's own choices with certainty."""
    tokens = [token % 5 for token in range(64)]
    drafts = DraftBatch.from_drafts([Draft.chain(tokens[:63])], "cpu")
    drafts = replace(
        drafts,
        probs_BNV=torch.eye(5)[tokens[:63]][None],
        is_sampled_BN=torch.ones(1, 63, dtype=torch.bool),
    )
    sampling = batch_of_params([SamplingParams()], seeds=[3], vocab_size=5, device="cpu")
    logits_RV = torch.eye(5)[tokens].log()
    for name in (*usable_instruction_sets(), "reference"):
        kernels = choose_kernels(name, torch.device("cpu"), torch.float32)
        for rule in Rule:
            verdict = kernels.verify(logits_RV, drafts, sampling, torch.tensor([9]), rule)
            assert verdict.token_ids_BN1.tolist() == [tokens]
            assert verdict.rows_BN.tolist() == [list(range(63))]
