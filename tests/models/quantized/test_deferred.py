"""Tensors that are not read yet: what is cut, joined or converted has the same numbers later."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.coded_weight import CodedWeight
from outdraft.models.checkpoints.files import Place, StoredTensors, plain_weights
from outdraft.models.checkpoints.reader import Checkpoint
from outdraft.models.checkpoints.stored import StoredParameter
from outdraft.models.library.checkpoint import DeferredTensor, presented, replace_deferred

NUMBERS = {
    "upper": torch.randn(6, 4, generator=torch.Generator().manual_seed(1)),
    "lower": torch.randn(10, 4, generator=torch.Generator().manual_seed(2)),
    "norm": torch.ones(4),
}


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Place]:
    file = tmp_path / "model.safetensors"
    save_file(NUMBERS, file)
    return {name: (file, name) for name in NUMBERS}


@pytest.fixture
def sizes_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of what is read, one after the other."""
    found: list[tuple[int, ...]] = []
    whole, part = StoredTensors.read, StoredTensors.read_part

    def noted(tensor: Tensor) -> Tensor:
        found.append(tuple(tensor.shape))
        return tensor

    monkeypatch.setattr(StoredTensors, "read", lambda *args: noted(whole(*args)))
    monkeypatch.setattr(StoredTensors, "read_part", lambda *args: noted(part(*args)))
    return found


def deferred(places: dict[str, Place], name: str, dtype: torch.dtype = torch.float32) -> Tensor:
    checkpoint = Checkpoint(plain_weights(places))
    return presented(checkpoint, dtype, keeps_codes=True, is_cut=True)[name][...]


def read(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DeferredTensor)
    return tensor.stored.numbers()


def test_only_products_are_deferred(places: dict[str, Place]) -> None:
    found = {name for name in places if isinstance(deferred(places, name), DeferredTensor)}
    assert found == {"upper", "lower"}


def test_plain_numbers_are_not_rounded(places: dict[str, Place]) -> None:
    assert torch.equal(read(deferred(places, "upper")), NUMBERS["upper"])
    halves = read(deferred(places, "upper", torch.bfloat16))
    assert torch.equal(halves, NUMBERS["upper"].bfloat16())


@pytest.mark.parametrize(("dim", "first", "count"), [(0, 0, 3), (0, 3, 3), (1, 2, 2), (1, 0, 4)])
def test_of_a_part_no_more_is_read(
    dim: int, first: int, count: int, places: dict[str, Place], sizes_read: list[tuple[int, ...]]
) -> None:
    want = NUMBERS["upper"].narrow(dim, first, count)
    part = deferred(places, "upper").narrow(dim, first, count).clone()
    assert part.shape == want.shape
    assert sizes_read == []
    assert torch.equal(read(part), want)
    assert sizes_read == [tuple(want.shape)]


@pytest.mark.parametrize(("first", "count"), [(0, 5), (4, 8), (7, 9), (0, 16)])
def test_a_part_of_joined_weights_is_read_from_each(
    first: int, count: int, places: dict[str, Place], sizes_read: list[tuple[int, ...]]
) -> None:
    both = torch.cat([deferred(places, name) for name in ("upper", "lower")])
    want = torch.cat([NUMBERS["upper"], NUMBERS["lower"]])[first : first + count]
    assert torch.equal(read(both[first : first + count]), want)
    assert sum(rows for rows, _ in sizes_read) == count


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("is_outputs", [False, True])
def test_a_part_of_stacked_weights_is_read_of_each(
    is_outputs: bool,
    is_transposed: bool,
    places: dict[str, Place],
    sizes_read: list[tuple[int, ...]],
) -> None:
    """As experts that have gate and up below one another."""
    upper = deferred(places, "upper")
    stack = torch.cat([torch.stack([upper, upper]), torch.stack([upper, upper])], dim=1)
    want = torch.cat([NUMBERS["upper"]] * 2).expand(2, 12, 4)
    dim = 1 if is_outputs else 2
    if is_transposed:
        stack, want, dim = stack.transpose(1, 2), want.transpose(1, 2), 3 - dim
    first, count = (4, 5) if is_outputs else (1, 2)
    part = stack.narrow(dim, first, count).clone()
    assert sizes_read == []
    assert torch.equal(read(part), want.narrow(dim, first, count))
    size = (2, 4, 3, 4) if is_outputs else (6, 2, 6, 2)
    assert sizes_read == [size[:2], size[2:]] * 2


class Codes:
    """A weight of a checkpoint, whose codes fit a tile; notes which tile they are asked for."""

    shape = (4, 64)

    def __init__(self, tile: WeightFormat) -> None:
        self.tile = tile
        self.asked: list[WeightFormat] = []

    def codes(self) -> "Codes":
        return self

    def coded(self, tile: WeightFormat) -> CodedWeight:
        self.asked.append(tile)
        num_groups = 64 // (tile.group_inputs or 64) or 1
        shifts_EN = torch.zeros(4, num_groups) if tile.has_zero else None
        codes_ED = torch.zeros(4, 64, dtype=torch.int8)
        return CodedWeight(tile, codes_ED, torch.ones(4, num_groups), shifts_EN)


def test_codes_of_all_experts_have_the_tile_that_fits_all() -> None:
    tiles = WeightFormat.INT4_G32, WeightFormat.INT4_G32_ZERO, WeightFormat.INT4_G32
    weights = [Codes(tile) for tile in tiles]
    experts = StoredParameter([[one] for one in weights], True, False, torch.float32)  # type: ignore[arg-type]
    assert experts.tile is not None
    assert [experts.coded(expert).format for expert in range(3)] == [WeightFormat.INT4_G32_ZERO] * 3
    assert [one.asked for one in weights] == [[WeightFormat.INT4_G32_ZERO]] * 3
    mixed = [[Codes(WeightFormat.INT4)], [Codes(WeightFormat.INT8)]]
    assert StoredParameter(mixed, True, False, torch.float32).tile is None  # type: ignore[arg-type]


def test_what_cannot_stay_unread_is_computed_with_its_numbers(places: dict[str, Place]) -> None:
    assert torch.equal(deferred(places, "upper")[::2] + 0, NUMBERS["upper"][::2])
    transposed = deferred(places, "upper").T
    assert torch.equal(transposed[1:3] + 0, NUMBERS["upper"].T[1:3])
    part = deferred(places, "upper")[1:]
    assert torch.equal(part[1:] + 0, NUMBERS["upper"][2:])  # it is cut once


def test_tied_weights_are_read_once_and_stay_tied(
    places: dict[str, Place], sizes_read: list[tuple[int, ...]]
) -> None:
    module = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(4, 6, bias=False))
    module[0].weight = module[1].weight = nn.Parameter(deferred(places, "upper"), False)
    replace_deferred(module, lambda *_: False)
    assert module[0].weight is module[1].weight
    assert torch.equal(module[0].weight, NUMBERS["upper"])
    assert sizes_read == [(6, 4)]
