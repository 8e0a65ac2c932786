"""Drawn chains on a GPU, verified by kernels of their own, as the reference does it.

Without a GPU the kernels are interpreted.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from outdraft.kernels.data.drafts import Rule
from outdraft.kernels.torch.table import reference_kernels
from tests.kernels.test_verification import Step

pytest.importorskip("triton", reason="needs triton")
from outdraft.kernels.choose import with_triton
from outdraft.kernels.triton import traversal

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
REFERENCE = reference_kernels()


class Chains(Step):
    """All drafts are chains, whoever made them."""

    def _tree(self, size, is_chain):
        return super()._tree(size, is_chain=True)


def moved(value, device):
    """Its tensors on a device."""
    return replace(
        value,
        **{
            one.name: found.to(device)
            for one in fields(value)
            if isinstance(found := getattr(value, one.name), torch.Tensor)
        },
    )


@pytest.mark.slow
@pytest.mark.few(2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("vocab_size", "most"), [(2, 1), (23, 6), (1500, 3)])
@pytest.mark.parametrize("seed", [0, 1])
def test_verdicts_are_those_of_the_reference(device, vocab_size, most, seed):
    """A coin or a token that is decided by rounding may fall either way."""
    rng = np.random.default_rng(seed)
    step = Chains(rng, 12, most, vocab_size, num_padding=seed)
    assert step.drafts.is_chain
    allowed = step.allowed(REFERENCE, Rule.TRAVERSAL)
    kernels = with_triton(REFERENCE, has_graphs=False)
    assert kernels.verify is traversal.verify
    step.logits_RV = step.logits_RV.to(device)
    step.drafts, step.sampling = moved(step.drafts, device), moved(step.sampling, device)
    step.num_tokens_B = step.num_tokens_B.to(device)
    got = step.verdicts(kernels, Rule.TRAVERSAL, torch.float32)
    assert all(one in ones for one, ones in zip(got, allowed, strict=True))


@pytest.mark.parametrize("device", DEVICES)
def test_drafts_of_a_broken_drafter_are_refused(device):
    """Its probabilities are NaN, as those behind NaN or infinite logits are."""
    step = Chains(np.random.default_rng(3), 8, 3, 9)
    probs_BNV = torch.full_like(step.drafts.probs_BNV, torch.nan)
    step.drafts = replace(step.drafts, probs_BNV=probs_BNV)
    arguments = step.logits_RV, step.drafts, step.sampling, step.num_tokens_B
    want = REFERENCE.verify(*arguments, Rule.TRAVERSAL)
    drafts, sampling = moved(step.drafts, device), moved(step.sampling, device)
    got = traversal.verify(
        step.logits_RV.to(device), drafts, sampling, step.num_tokens_B.to(device), Rule.TRAVERSAL
    )
    assert torch.equal(got.num_emitted_B.cpu(), want.num_emitted_B)
    assert torch.equal(got.token_ids_BN1.cpu(), want.token_ids_BN1)
