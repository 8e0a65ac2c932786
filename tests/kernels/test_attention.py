"""Attention by each table against the reference in float64."""

import torch
from hypothesis import strategies as st

from outdraft.kernels.torch.attention import TorchAttention
from tests.attention.ragged import build_batch, converted, layers, shapes
from tests.kernels.comparisons import Case

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # weights are rounded to the cache's dtype


def compare_attention(case: Case) -> None:
    requests = case.data.draw(st.lists(shapes(), min_size=1, max_size=3), "requests")
    model, form = case.data.draw(layers(), "layer")
    batch = build_batch(requests, model, case.dtype, case.data.draw(st.integers(0, 2**16), "seed"))
    q_THC = batch.q_THC.to(case.dtype)
    if case.kernels.name == "triton":
        q_THC = (
            q_THC.float()
        )  # its interpreter multiplies bfloat16 numbers as if they were integers
    got = case.kernels.attention.attend(q_THC, batch.cache, batch.metadata, form)
    exact = converted(batch.cache, torch.float64)
    want = TorchAttention().attend(q_THC.double(), exact, batch.metadata, form)
    assert got.dtype == q_THC.dtype
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


COMPARISONS = {"attention": compare_attention}
