"""How much of a row's attention each block gets: by the definition, and the twins alike."""

import pytest
import torch
from hypothesis import strategies as st

from outdraft.kernels.choose import choose_kernels, kernels_options
from tests.kernels.comparisons import Case

CPU = torch.device("cpu")
SIZES = [(1, 1, 8), (4, 2, 20), (6, 2, 64)]  # heads, kv heads, head size
LENGTHS = (1, 16, 17, 50)


def by_definition(q_HC, k_KGC, scale, block_size):
    """A dict of lists would do: head by head, key by key."""
    masses = torch.zeros(-(-len(k_KGC) // block_size), dtype=torch.float64)
    for head, q_C in enumerate(q_HC.double()):
        keys_KC = k_KGC[:, head * k_KGC.shape[1] // len(q_HC)].double()
        weights_K = (keys_KC @ q_C * scale).exp()
        for key, weight in enumerate(weights_K / weights_K.sum()):
            masses[key // block_size] += weight
    return masses


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kernels", kernels_options())
def test_each_block_has_the_weights_of_its_keys(kernels, sizes, dtype):
    torch.manual_seed(len(kernels))
    num_heads, num_kv_heads, head_size = sizes
    block_size, num_blocks = 16, 12
    k_PSGC = torch.randn(num_blocks, block_size, num_kv_heads, head_size).to(dtype)
    q_BHC = torch.randn(len(LENGTHS), num_heads, head_size).to(dtype)
    table_BP = torch.stack([torch.randperm(num_blocks)[:4] for _ in LENGTHS]).int()
    block_mass = choose_kernels(kernels, CPU, dtype).block_mass
    mass_BP = block_mass(q_BHC, k_PSGC, table_BP, torch.tensor(LENGTHS), 0.3)
    assert mass_BP.dtype is torch.float32
    for mass_P, q_HC, blocks_P, length in zip(mass_BP, q_BHC, table_BP, LENGTHS, strict=True):
        k_KGC = k_PSGC[blocks_P.long()].flatten(0, 1)[:length]
        expected = by_definition(q_HC, k_KGC, 0.3, block_size)
        torch.testing.assert_close(mass_P[: len(expected)].double(), expected, atol=1e-5, rtol=1e-5)
        assert not mass_P[len(expected) :].any()
        assert float(mass_P.sum()) == pytest.approx(num_heads, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernels", kernels_options())
def test_a_long_text_has_one_softmax(kernels, dtype):
    """It has parts that threads share, and more heads for each kv head than products have rows."""
    torch.manual_seed(3)
    block_size, lengths = 24, (1, 505, 1500)  # 21 blocks are a part
    k_PSGC = torch.randn(70, block_size, 2, 16).to(dtype)
    q_BHC = 3 * torch.randn(len(lengths), 14, 16).to(dtype)
    table_BP = torch.stack([torch.randperm(70)[:63] for _ in lengths]).int()
    block_mass = choose_kernels(kernels, CPU, dtype).block_mass
    mass_BP = block_mass(q_BHC, k_PSGC, table_BP, torch.tensor(lengths), 0.3)
    for mass_P, q_HC, blocks_P, length in zip(mass_BP, q_BHC, table_BP, lengths, strict=True):
        k_KGC = k_PSGC[blocks_P.long()].flatten(0, 1)[:length]
        expected = by_definition(q_HC, k_KGC, 0.3, block_size)
        torch.testing.assert_close(mass_P[: len(expected)].double(), expected, atol=1e-5, rtol=1e-4)
        assert not mass_P[len(expected) :].any()


def compare_block_mass(case: Case) -> None:
    """Texts of any length over blocks in any order."""
    rng, draw = case.rng(), case.data.draw
    num_heads, num_kv_heads, head_size = draw(st.sampled_from(SIZES), "sizes")
    block_size, width = (
        draw(st.sampled_from((1, 4, 16)), "slots"),
        draw(st.integers(1, 5), "blocks"),
    )
    num_requests = draw(st.integers(1, 4), "requests")
    num_blocks = num_requests * width
    cache = rng.normal(size=(num_blocks, block_size, num_kv_heads, head_size))
    q_BHC = torch.tensor(rng.normal(size=(num_requests, num_heads, head_size))).to(case.dtype)
    table_BP = torch.tensor(rng.permutation(num_blocks).reshape(num_requests, width)).int()
    lengths_B = torch.tensor(rng.integers(1, width * block_size, num_requests, endpoint=True))
    batch = q_BHC, torch.tensor(cache).to(case.dtype), table_BP, lengths_B, 0.3
    found, expected = (each.block_mass(*batch) for each in (case.kernels, case.reference))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


COMPARISONS = {"block_mass": compare_block_mass}
