"""Functions as graphs: which calls share one, and what they return.

What stands for a graph repeats the function on the tensors that the graph would read.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.kernels.ops import WarmUps
from outdraft.kernels.triton import graphs
from outdraft.kernels.triton.graphs import CallGraphs, Padding


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


def test_calls_that_are_alike_share_a_graph():
    times = WarmUps()
    made, repeats = CallGraphs[Outer](times, capture := Repeats()), capture
    for seed in range(5):
        call = outer(seed)
        assert_same(made.call(function, *call), function(*call))
    assert repeats.num_made == 1
    assert times.count == 2  # the first call, and the graph


def test_all_graphs_of_a_function_lie_in_the_same_memory():
    graphs = CallGraphs[Outer](WarmUps(), Repeats())
    places = set[int]()
    for rows in (2, 3, 2, 3, 2, 3):
        call = outer(rows, rows=rows)
        got = graphs.call(function, *call)
        assert_same(got, function(*call))
        places.add(got.x_BN.untyped_storage().data_ptr())
    assert len(places) == 2  # of the first call, and of all graphs


def test_lengths_that_are_rounded_up_share_a_graph_which_finds_zeros_behind_them():
    repeats, longest = Repeats(), list[int]()

    def looking(outer: Outer, factor_B: Tensor) -> Outer:
        assert not factor_B[longest[-1] :].any()
        return function(outer, factor_B)

    graphs = CallGraphs[Outer](WarmUps(), repeats)
    for seed, rows in enumerate((4, 2, 4, 3, 2, 4, 3)):
        longest.append(rows)
        inputs, factor_B = outer(seed, rows=rows)
        got = graphs.call(looking, inputs, factor_B + 1, paddings=[Padding((4,))] * 2)
        want = function(inputs, factor_B + 1)
        assert torch.equal(got.x_BN[:rows], want.x_BN)
        assert torch.equal(got.inner.scale_B[:rows], want.inner.scale_B)
    assert repeats.num_made == 1


@pytest.mark.parametrize(
    ("other", "is_launched_alike"),
    [
        (outer(0, rows=3), True),
        (outer(0, sizes=(1,)), False),
        (outer(0, nothing=torch.zeros(1)), False),
        (outer(0, inner=Inner(torch.zeros(2).double(), is_on=False)), False),
        (outer(0, inner=Inner(torch.zeros(2), is_on=True)), False),
        (outer(0, inner=Inner(torch.zeros(2).double(), is_on=True, name="x")), False),
    ],
)
def test_calls_that_differ_share_no_graph(other, is_launched_alike):
    repeats = Repeats()
    graphs = CallGraphs[Outer](WarmUps(), repeats)
    for call in (outer(0), outer(1)):
        graphs.call(function, *call)
    for number in (2, 2) if is_launched_alike else (1, 2, 2):
        assert_same(graphs.call(function, *other), function(*other))
        assert repeats.num_made == number


def test_what_takes_too_much_memory_stays_launch_by_launch():
    repeats, calls = Repeats(), [outer(seed) for seed in range(3)]
    num_aligned = 3 + 2  # tensors that are given, and that come out
    num_bytes = num_aligned * graphs._ALIGNED
    for most_bytes, num_made in ((num_bytes - 1, 1), (num_bytes, 2)):
        made = CallGraphs[Outer](WarmUps(), repeats, most_bytes)
        for call in calls:
            assert_same(made.call(function, *call), function(*call))
        assert repeats.num_made == num_made


def test_tensors_grow_in_two_dimensions_and_are_filled_with_a_value():
    def function(x_BN: Tensor) -> Tensor:
        return x_BN + 0

    made, paddings = (
        CallGraphs[Tensor](WarmUps(), lambda launch: (launch, launch())),
        [Padding((4, 3), -1)],
    )
    for rows, columns in ((2, 2), (4, 3), (1, 3), (3, 1)):
        x_BN = torch.rand(rows, columns)
        want = torch.full((4, 3), -1.0)
        want[:rows, :columns] = x_BN
        assert torch.equal(made.call(function, x_BN, paddings=paddings), want)


def test_the_graph_that_was_not_called_for_longest_leaves(monkeypatch):
    monkeypatch.setattr(graphs, "MOST_GRAPHS", 2)
    repeats = Repeats()
    made = CallGraphs[Outer](WarmUps(), repeats)
    for rows, num_made in ((9, 0), (2, 1), (3, 2), (2, 2), (4, 3), (2, 3), (3, 4), (4, 5)):
        call = outer(rows, rows=rows)
        assert_same(made.call(function, *call), function(*call))
        assert repeats.num_made == num_made, rows
