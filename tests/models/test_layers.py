"""Packed products and fused kernels against their plain torch twins."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outdraft.models.config import ModelConfig
from outdraft.models.layers.activation import silu_mul, silu_mul_cpu
from outdraft.models.layers.norm import RMSNorm, add_rms_norm, rms_norm
from outdraft.models.layers.rotary import (
    Rotary,
    attention_factor,
    frequencies,
    rotate,
    split_rotate,
)
from outdraft.models.rope_config import RopeConfig
from tests.models.checkpoints import LINEAR, LLAMA3, TINY, YARN

CPU = torch.device("cpu")


def random_norm(size: int, dtype: torch.dtype = torch.float32) -> RMSNorm:
    norm = RMSNorm(size, 1e-5, dtype=dtype, device=CPU)
    norm.weight.normal_()
    return norm


kernel_sizes = given(
    num_rows=st.integers(0, 9), size=st.integers(1, 70), scale=st.sampled_from([0.0, 1e-3, 1e3])
)


@settings(max_examples=40, deadline=None)
@kernel_sizes
def test_the_fused_norms_equal_their_torch_twins(num_rows, size, scale):
    torch.manual_seed(size)
    norm = random_norm(size)
    x_TD, residual_TD = torch.randn(num_rows, size) * scale, torch.randn(num_rows, size) * scale
    want_residual_TD = residual_TD.clone()
    want_TD = add_rms_norm(x_TD, want_residual_TD, norm.weight, norm.eps)

    torch.testing.assert_close(norm(x_TD), rms_norm(x_TD, norm.weight, norm.eps))
    torch.testing.assert_close(norm.add(x_TD, residual_TD), want_TD)
    assert torch.equal(residual_TD, want_residual_TD)


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(0, 9), size=st.integers(1, 70), scale=st.sampled_from([0.1, 3.0, 60.0]))
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2.0**-6)]
)
def test_the_fused_gate_equals_its_torch_twin(dtype, rtol, num_rows, size, scale):
    torch.manual_seed(size)
    gate_up_T2I = (torch.randn(num_rows, 2 * size) * scale).to(dtype)

    got_TI = silu_mul_cpu(gate_up_T2I)

    torch.testing.assert_close(got_TI, silu_mul(gate_up_T2I), rtol=rtol, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_fused_gate_keeps_the_values_at_the_ends(dtype):
    gates = [-1e30, -300.0, -0.0, 0.0, 300.0, 1e30, torch.inf, torch.nan]
    gate_up_T2I = torch.tensor([gates + [1.0] * len(gates)], dtype=dtype)

    got_TI = silu_mul_cpu(gate_up_T2I)

    torch.testing.assert_close(got_TI, silu_mul(gate_up_T2I), rtol=1e-6, atol=1e-6, equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(0, 7),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (3, 3)]),
    head_size=st.sampled_from([2, 6, 16, 64]),
    has_norms=st.booleans(),
)
def test_the_fused_rotation_equals_its_torch_twin(num_rows, heads, head_size, has_norms):
    torch.manual_seed(head_size)
    rotary = Rotary(RopeConfig(), head_size, 50, dtype=torch.float32, device=CPU)
    norms = (random_norm(head_size), random_norm(head_size)) if has_norms else None
    qkv_TE = torch.randn(num_rows, (heads[0] + 2 * heads[1]) * head_size)
    cos_sin_TC = rotary.at(torch.randint(0, 50, (num_rows,)))

    got = rotary.split(qkv_TE, cos_sin_TC, *heads, norms)

    want = split_rotate(qkv_TE, cos_sin_TC, *heads, norms)
    for got_part, want_part in zip(got, want, strict=True):
        torch.testing.assert_close(got_part, want_part)


def test_rotated_products_depend_on_the_distance_only():
    rotary = Rotary(RopeConfig(), 16, 100, dtype=torch.float64, device=CPU)
    q_C, k_C = torch.randn(2, 16, dtype=torch.float64)

    def product(q_position: int, k_position: int) -> float:
        cos_sin_TC = rotary.at(torch.tensor([q_position, k_position]))
        q, k = rotate(torch.stack((q_C, k_C))[:, None], cos_sin_TC)
        return float((q * k).sum())

    assert product(7, 3) == pytest.approx(product(97, 93), abs=1e-10)
    assert product(7, 3) != pytest.approx(product(7, 4), abs=1e-3)


@pytest.mark.parametrize("scaling", [LINEAR, LLAMA3, YARN, YARN | {"truncate": False}])
@pytest.mark.parametrize("head_size", [8, 64, 128])
def test_stretched_frequencies_are_those_of_transformers(scaling, head_size):
    theirs = LlamaConfig(**TINY | {"head_dim": head_size, "rope_parameters": dict(scaling)})
    theirs.architectures = ["LlamaForCausalLM"]
    want_F, want_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](theirs, "cpu")

    rope = ModelConfig.from_mapping(theirs.to_dict()).rope

    torch.testing.assert_close(frequencies(rope, head_size), want_F, rtol=1e-6, atol=0)
    assert attention_factor(rope) == pytest.approx(want_factor, rel=1e-12)
