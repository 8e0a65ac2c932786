"""Arithmetic on one row against numpy in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.sampling.row_kernels import argmax, exp_below, maximum, softmax


def row(seed, size, scale=3.0, masked=0.0):
    rng = np.random.default_rng(seed)
    x_V = (scale * rng.normal(size=size)).astype(np.float32)
    x_V[rng.random(size) < masked] = -np.inf
    x_V[rng.integers(size)] = np.float32(scale)
    return x_V


sizes = st.integers(1, 3000)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 999), sizes, st.floats(0, 1000), st.sampled_from([0.0, 0.5, 1.0]))
def test_the_maximum_and_its_first_place_are_those_of_numpy(seed, size, scale, masked):
    x_V = np.round(row(seed, size, scale, masked))  # rounded: ties, zeros of both signs
    assert maximum(x_V) == x_V.max()
    assert argmax(x_V) == x_V.argmax()


@pytest.mark.parametrize("values", [[-3.0, -1.0], [-0.0, 0.0], [0.0, -0.0], [-np.inf, -np.inf]])
def test_the_maximum_orders_signs_and_infinities(values):
    assert maximum(np.array(values, dtype=np.float32)) == max(values)


def test_exponentials_are_right_to_float32_over_their_whole_range():
    x_V = np.append(np.linspace(-86.9, 0, 300_001), [-100, -1e9, -np.inf]).astype(np.float32)
    out_V = np.empty_like(x_V)
    exp_below(x_V, np.float32(0), out_V)
    np.testing.assert_allclose(out_V[:-3], np.exp(x_V[:-3].astype(np.float64)), rtol=1.5e-7)
    assert out_V[-4] == 1
    assert (out_V[-3:] == 0).all()


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 999), sizes, st.floats(0, 50), st.sampled_from([0.0, 0.9]))
def test_a_softmax_is_that_of_float64_and_sums_to_one(seed, size, scale, masked):
    x_V = row(seed, size, scale, masked)
    got_V = np.empty_like(x_V)
    softmax(x_V, got_V)
    exact_V = np.exp(x_V.astype(np.float64) - x_V.max())
    # x - best is rounded: to 4e-6 where it is near the end of the range.
    np.testing.assert_allclose(got_V, exact_V / exact_V.sum(), rtol=6e-6, atol=1e-36)
    assert abs(got_V.sum(dtype=np.float64) - 1) < 1e-6


def test_exponentials_of_a_number_do_not_depend_on_its_place():
    x_V = np.full(1999, -1.2345678, dtype=np.float32)
    out_V = np.empty_like(x_V)
    exp_below(x_V, np.float32(0.1), out_V)
    assert len(set(out_V.tolist())) == 1
