"""The counting itself: what waits raises, and what launches is counted."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="needs triton")
import triton

from tests.gpu_budget.meta_device import DRAFT, META, PASS, Device, HostWaitError, moved


def numbers(*shape: int) -> Tensor:
    return torch.zeros(shape, device=META)


def ids() -> Tensor:
    return torch.zeros(3, dtype=torch.int64, device=META)


WAITS: dict[str, Callable[[], object]] = {
    "item": lambda: numbers(1).item(),
    "int": lambda: int(ids()[0]),
    "bool": lambda: bool((ids() > 0).any()),
    "tolist": lambda: ids().tolist(),
    "to the host": lambda: numbers(3).cpu(),
    "numpy": lambda: numbers(3).cpu().numpy(),
    "unique": lambda: ids().unique(),
    "nonzero": lambda: ids().nonzero(),
    "where": lambda: torch.where(ids() > 0),
    "by a mask": lambda: numbers(3)[ids() > 0],
    "masked_select": lambda: torch.masked_select(numbers(3), ids() > 0),
    "by a number of the device": lambda: numbers(3)[ids()[0]],
    "by numbers of the host": lambda: numbers(3)[torch.tensor([1, 2])],
    "set by a mask": lambda: numbers(3).index_put_((ids() > 0,), numbers(2)),
    "repeated by numbers": lambda: ids().repeat_interleave(ids()),
    "equal": lambda: torch.equal(ids(), ids()),
    "of a list": lambda: torch.tensor([1, 2], device=META),
    "sent": lambda: torch.zeros(3).to(META),
    "copied": lambda: numbers(3).copy_(torch.zeros(3)),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", WAITS)
def test_what_waits_raises(name: str, inference: bool):
    device = Device()
    with (
        torch.inference_mode(inference),
        device.running(),
        pytest.raises((HostWaitError, RuntimeError, NotImplementedError, ValueError)),
    ):
        WAITS[name]()


LAUNCHES: dict[str, tuple[int, Callable[[], object]]] = {
    "an allocation": (0, lambda: torch.empty(3, device=META)),
    "views": (0, lambda: torch.empty(4, 6, device=META)[1:].view(3, 2, 3).transpose(0, 1)),
    "nothing": (0, lambda: numbers(0)),
    "a sum": (2, lambda: numbers(3) + 1),
    "a product": (3, lambda: torch.nn.functional.linear(numbers(2, 3), numbers(5, 3))),
    "a mask with a number": (4, lambda: numbers(3).masked_fill(ids() > 0, 0)),
    "sent": (1, lambda: torch.zeros(3).to(META, non_blocking=True)),
    "of the host": (0, lambda: torch.zeros(3) + 1),
}


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_are_counted(name: str, inference: bool):
    number, run = LAUNCHES[name]
    with torch.inference_mode(inference), Device().running() as counts:
        run()
    assert sum(counts.launches()) == number


def test_kernels_count_for_the_outer_phase_and_do_nothing():
    @triton.jit
    def some_kernel(_):
        raise AssertionError("it runs")

    device = Device()
    inner = device.during(PASS, lambda: some_kernel[(1,)](numbers(2)))
    outer = device.during(DRAFT, lambda: (inner(), inner()))
    with device.running() as counts:
        outer()
        inner()
    assert counts.launches() == (4, 2, 0, 0)
    assert counts.num_bytes == {DRAFT: 16, PASS: 8}


def test_a_graph_is_one_launch():
    device = Device()
    with device.running():
        replay, _ = device.capture(lambda: numbers(3) + 1)
    with device.running() as counts:
        replay()
    assert counts.names == {"rest": {"graph": 1}}


def test_everything_inside_an_object_moves():
    class Held:
        def __init__(self) -> None:
            weight = torch.ones(2)
            self.one, self.all, self.by_name = weight, [(weight, 1)], {"a": weight}
            self.run = lambda: weight

    Held.__module__ = "tests"
    held = moved(Held())
    found = [held.one, held.all[0][0], held.by_name["a"], held.run()]
    assert all(one.device == META for one in found)
    assert all(one is held.one for one in found)
