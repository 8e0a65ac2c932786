"""Rows of one root mean square: each library as the reference makes them."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.comparisons import Case

# A number is rounded a few times on its way, in the reference also to bfloat16.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 4 * 2.0**-8}
EPS = 1e-6


def rows(case: Case, num_rows: int, size: int) -> Tensor:
    scale = case.data.draw(st.sampled_from([0.1, 1.0, 20.0]), "scale")
    rng = case.rng()
    return torch.from_numpy(scale * rng.normal(size=(num_rows, size))).to(case.dtype)


def sizes(case: Case) -> tuple[int, int]:
    return case.data.draw(st.integers(1, 4), "rows"), case.data.draw(st.integers(1, 70), "size")


def assert_near(got: Tensor, want: Tensor) -> None:
    assert got.dtype is want.dtype
    size = max(1.0, float(want.abs().max()))
    bound = BOUNDS[want.dtype] * size
    torch.testing.assert_close(got.double(), want.double(), rtol=0, atol=bound)


def assert_rows_are_alone(case: Case, got_RS: Tensor, alone: list[Tensor]) -> None:
    """In the compiled library; torch computes vectors of numbers otherwise than what is left."""
    if case.kernels.name != case.reference.name:
        assert torch.equal(got_RS, torch.cat(alone))


def compare_scale_to_rms(case: Case) -> None:
    x_RS = rows(case, *sizes(case))
    got_RS, want_RS = (
        kernels.scale_to_rms(x_RS, 0.7, EPS) for kernels in (case.kernels, case.reference)
    )
    assert_near(got_RS, want_RS)
    alone = [case.kernels.scale_to_rms(x_S[None], 0.7, EPS) for x_S in x_RS]
    assert_rows_are_alone(case, got_RS, alone)


COMPARISONS = {"scale_to_rms": compare_scale_to_rms}
