"""Functions as graphs: which calls share one, and that results are nobody else's.

What stands for a graph repeats the function on the tensors that the graph would read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")
from outdraft.distributed.request_shares import ALL_HERE, RequestShares
from outdraft.kernels.data.first_times import FirstTimes
from outdraft.kernels.triton.graphed_calls import CallGraphs


@dataclass(frozen=True)
class Inner:
    scale_B: Tensor
    is_on: bool
    name: str | None = None


@dataclass(frozen=True)
class Outer:
    inner: Inner
    x_BN: Tensor
    nothing: Tensor | None
    shares: RequestShares
    sizes: tuple[int, ...] = ()


class Repeats:
    """It counts what it made."""

    def __init__(self) -> None:
        self.num_made = 0

    def __call__(self, launch: Callable[[], Outer]) -> tuple[Callable[[], None], Outer]:
        self.num_made += 1
        kept = launch()

        def repeat() -> None:
            made = launch()
            kept.x_BN.copy_(made.x_BN)
            kept.inner.scale_B.copy_(made.inner.scale_B)

        return repeat, kept


def function(outer: Outer, factor_B: Tensor) -> Outer:
    sign = 1 if outer.inner.is_on else -1
    x_BN = sign * outer.x_BN * factor_B[:, None].float()
    return replace(outer, x_BN=x_BN, inner=replace(outer.inner, scale_B=outer.inner.scale_B + 1))


def outer(seed: int, rows: int = 2, **changes: Any) -> tuple[Outer, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x_BN = torch.randn(3, rows, generator=generator).t()  # its rows are not contiguous
    inner = Inner(torch.randn(rows, generator=generator).double(), is_on=True)
    made = Outer(inner, x_BN, None, ALL_HERE)
    return replace(made, **changes), torch.arange(rows)


def assert_same(got: Outer, want: Outer) -> None:
    assert torch.equal(got.x_BN, want.x_BN)
    assert torch.equal(got.inner.scale_B, want.inner.scale_B)
    assert got.sizes == want.sizes


def test_calls_that_are_alike_share_a_graph_and_keep_their_results():
    times = FirstTimes()
    graphs, repeats = CallGraphs[Outer](times, capture := Repeats()), capture
    calls = [outer(seed) for seed in range(5)]
    found = [graphs.call(function, *call) for call in calls]
    for got, call in zip(found, calls, strict=True):
        assert_same(got, function(*call))
    assert repeats.num_made == 1
    assert times.number == 2  # the first call, and the graph


@pytest.mark.parametrize(
    "other",
    [
        outer(0, rows=3),
        outer(0, sizes=(1,)),
        outer(0, nothing=torch.zeros(1)),
        outer(0, inner=Inner(torch.zeros(2).double(), is_on=False)),
        outer(0, inner=Inner(torch.zeros(2), is_on=True)),
        outer(0, inner=Inner(torch.zeros(2).double(), is_on=True, name="x")),
    ],
)
def test_calls_that_differ_share_none(other):
    repeats = Repeats()
    graphs = CallGraphs[Outer](FirstTimes(), repeats)
    for call in (outer(0), outer(1)):
        graphs.call(function, *call)
    for number in (1, 2, 2):
        assert_same(graphs.call(function, *other), function(*other))
        assert repeats.num_made == number


def test_what_takes_too_much_memory_stays_launch_by_launch():
    repeats, calls = Repeats(), [outer(seed) for seed in range(3)]
    num_bytes = sum(
        one.nbytes for one in (calls[0][0].x_BN, calls[0][0].inner.scale_B, calls[0][1])
    )
    for most_bytes, num_made in ((num_bytes - 1, 0), (num_bytes, 1)):
        graphs = CallGraphs[Outer](FirstTimes(), repeats, most_bytes)
        for call in calls:
            assert_same(graphs.call(function, *call), function(*call))
        assert repeats.num_made == num_made
