"""The gate and the rotation of the readable layers, and frequencies of rotary positions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outdraft.kernels.torch.pointwise import rotate, silu_mul
from outdraft.models.decoder.config import ModelConfig, RopeConfig
from outdraft.models.decoder.layers import Kind, attention_factor, frequencies, rotary_table
from tests.models.checkpoints import LINEAR, LLAMA3, TINY, YARN

CPU = torch.device("cpu")


def torch_silu_mul(gate_up_T2I: Tensor) -> Tensor:
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    return functional.silu(gate_TI) * up_TI


@settings(max_examples=40, deadline=None)
@given(num_rows=st.integers(0, 9), size=st.integers(1, 70), scale=st.sampled_from([0.1, 3.0, 60.0]))
@pytest.mark.parametrize(
    ("dtype", "rtol"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 2.0**-6)]
)
def test_the_gate_equals_torchs(dtype, rtol, num_rows, size, scale):
    torch.manual_seed(size)
    gate_up_T2I = (torch.randn(num_rows, 2 * size) * scale).to(dtype)

    got_TI = silu_mul(gate_up_T2I)

    torch.testing.assert_close(got_TI, torch_silu_mul(gate_up_T2I), rtol=rtol, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gate_keeps_the_values_at_the_ends(dtype):
    gates = [-1e30, -300.0, -0.0, 0.0, 300.0, 1e30, torch.inf, torch.nan]
    gate_up_T2I = torch.tensor([gates + [1.0] * len(gates)], dtype=dtype)

    got_TI = silu_mul(gate_up_T2I)

    torch.testing.assert_close(
        got_TI, torch_silu_mul(gate_up_T2I), rtol=1e-6, atol=1e-6, equal_nan=True
    )


def test_rotated_products_depend_on_the_distance_only():
    table_MC = rotary_table(RopeConfig(), 16, 100, Kind(dtype=torch.float64, device=CPU))
    q_C, k_C = torch.randn(2, 16, dtype=torch.float64)

    def product(q_position: int, k_position: int) -> float:
        cos_sin_TC = table_MC[[q_position, k_position]]
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
