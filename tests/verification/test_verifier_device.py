"""The verifier off the CPU: it never waits for the device, and CUDA gives the same verdict."""

from dataclasses import replace

import pytest
import torch

from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.data.sampling import Paths
from outdraft.kernels.torch import noise
from outdraft.verification.verifier import Verifier
from tests.sampling_batches import batch_of_params

VOCAB = 16
EVERYTHING = SamplingParams(
    temperature=0.8,
    top_k=9,
    top_p=0.9,
    min_p=0.01,
    presence_penalty=0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={3: 1.0},
    allowed_token_ids=list(range(12)),
    min_tokens=3,
)


def step(device, method, params=EVERYTHING, sampled_trees=False):
    """One step of a greedy request, a sampled chain and a tree, all with every processor."""
    generator = torch.Generator().manual_seed(0)
    trees = [Draft.chain((1, 2, 3)), Draft.chain((4, 5)), Draft((6, 6, 7), (0, 0, 1))]
    drafts = replace(
        DraftBatch.from_drafts(trees, device),
        probs_BNV=torch.rand(3, 3, VOCAB, generator=generator).softmax(2).to(device),
        is_sampled_BN=torch.tensor([False, True, False])[:, None].expand(3, 3).to(device),
        sampled_trees=sampled_trees,
    )
    greedy = replace(params, temperature=0.0)
    sampling = batch_of_params(
        [greedy, params, params],
        seeds=[1, 2, 3],
        vocab_size=VOCAB,
        device=device,
        bad_words=[[[1, 2]], [], [[6]]],
        stop_ids=[[0], [0, 1], []],
    )
    committed = Paths(
        torch.tensor([[1, 2, 3, -1], [4, 5, 6, 7], [8, -1, -1, -1]]).to(device),
        torch.tensor([2, 2, 1]).to(device),
        torch.tensor([3, 4, 1]).to(device),
        None,
    )
    logits_RV = torch.randn(11, VOCAB, generator=generator).to(device)
    kernels = choose_kernels("auto", torch.device(device), torch.float32)
    verifier = Verifier(kernels, method)
    if device == "cuda":  # the second time it becomes a graph, the third time that is repeated
        for _ in range(2):
            verifier.verify(logits_RV.flip(0), drafts, sampling, committed)
    return verifier.verify(logits_RV, drafts, sampling, committed)


@pytest.mark.parametrize("method", ["block", "token", "drafter_invariant", "lossy_typical"])
@pytest.mark.parametrize("sampled_trees", [False, True])
@pytest.mark.parametrize("params", [EVERYTHING, SamplingParams(), SamplingParams(top_k=5)])
def test_a_step_never_reads_a_tensor_on_the_host(method, params, sampled_trees):
    """Tensors of the meta device have no values: whoever needs one raises."""
    verdict = step("meta", method, params, sampled_trees)
    assert verdict.token_ids_BN1.shape == (3, 4)
    assert verdict.num_emitted_B.shape == (3,)
    assert verdict.rows_BN.shape == (3, 3)


@pytest.mark.gpu
def test_noise_has_the_same_bits_on_cuda():
    key = (torch.arange(7) * 10**12, torch.arange(7))
    on_cpu = noise.gumbel(NoiseKeys.of(*key, Purpose.SAMPLE), 50_001)
    on_cuda = noise.gumbel(NoiseKeys.of(*(one.cuda() for one in key), Purpose.SAMPLE), 50_001)
    assert torch.equal(on_cpu, on_cuda.cpu())


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["block", "token", "drafter_invariant", "lossy_typical"])
@pytest.mark.parametrize("sampled_trees", [False, True])
def test_verdicts_on_cuda_are_those_on_the_cpu(method, sampled_trees):
    on_cpu, on_cuda = (
        step(device, method, sampled_trees=sampled_trees) for device in ("cpu", "cuda")
    )
    assert torch.equal(on_cpu.token_ids_BN1, on_cuda.token_ids_BN1.cpu())
    assert torch.equal(on_cpu.rows_BN, on_cuda.rows_BN.cpu())
