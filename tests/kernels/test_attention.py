"""Attention by each table against the reference in float64."""

import torch
from hypothesis import strategies as st

from outdraft.attention.base import AttentionForm
from outdraft.kernels.reference.attention import ReferenceAttention
from tests.attention.ragged import build_batch, converted, models, shapes
from tests.kernels.comparisons import Case

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # weights are rounded to the cache's dtype


def compare_attention(case: Case) -> None:
    requests = case.data.draw(st.lists(shapes(), min_size=1, max_size=3), "requests")
    model = case.data.draw(models(), "model")
    window = case.data.draw(st.none() | st.integers(1, 40), "window")
    batch = build_batch(requests, model, case.dtype, case.data.draw(st.integers(0, 2**16), "seed"))
    q_THC, scale = batch.q_THC.to(case.dtype), model.head_size**-0.5
    if case.kernels.name == "triton":
        q_THC = (
            q_THC.float()
        )  # its interpreter multiplies bfloat16 numbers as if they were integers
    got = case.kernels.attention.attend(
        q_THC, batch.cache, batch.metadata, AttentionForm(scale, window)
    )
    exact = converted(batch.cache, torch.float64)
    want = ReferenceAttention().attend(
        q_THC.double(), exact, batch.metadata, AttentionForm(scale, window)
    )
    assert got.dtype == q_THC.dtype
    tolerance = TOLERANCE[case.dtype]
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


COMPARISONS = {"attention": compare_attention}
