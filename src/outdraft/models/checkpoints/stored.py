"""Weights of a quantised checkpoint, before they are read.

Nothing here knows a network: a weight has the name that a plain checkpoint gives it.

Dimension key: X experts, D inputs, E outputs, N groups of inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outdraft.core.weights import WeightFormat
from outdraft.kernels.data.block_weight import TILE_BYTES, TILE_OUTPUTS, BlockRows, fits_tiles
from outdraft.kernels.data.coded_weight import CodedWeight, Codes, joined

CUT_GROUP = "a rank's part begins in the middle of a group"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredWeight:
    """A weight in the files of a checkpoint.

    Attributes:
        shape: outputs and inputs; of a norm or a bias its only size; of plain numbers any sizes.
        label: how it is stored, for people; of plain numbers it ends with their dtype.
        name: of the tensor in its file; "": it is made of several.
        group_inputs: inputs that share a scale, for codes.
        tile: the format that keeps its codes and scales as they are; None: there is none.
        reason: why there is none.
        scale_bytes: of a scale of the tile: 2, bfloat16 or float16, or 4, float32.
        is_plain: it is not quantised.
        read: its codes; or the numbers of what is no codes in groups, of float32 or of the dtype in
            which a plain weight is stored.
        read_part: the numbers at these indices; None: they are read at once.
        whole: the weight that it is a part of.
    """

    shape: tuple[int, ...]
    label: str
    group_inputs: int
    name: str = ""
    tile: WeightFormat | None = None
    reason: str = ""
    scale_bytes: int = 4
    is_plain: bool = False
    read: Callable[[], CodedWeight | BlockRows | Tensor]
    read_part: Callable[..., Tensor] | None = None
    whole: "StoredWeight | None" = None

    @property
    def dtype(self) -> str:
        """That of plain numbers, by its name in safetensors, such as "F16"."""
        return self.label.rpartition(" ")[2]

    @property
    def coded_bytes(self) -> int:
        """Bytes of its codes and scales; only of a weight with a tile."""
        assert self.tile is not None, "a tile of numbers"
        num_outputs, num_inputs = self.shape
        if self.tile.is_blocks:
            return num_outputs * num_inputs // self.tile.group_inputs * TILE_BYTES[self.tile]
        num_groups = -(-num_inputs // (self.tile.group_inputs or num_inputs))
        of_scales = self.scale_bytes * (2 if self.tile.has_zero else 1)
        of_codes = num_inputs * (8 if self.tile.is_int8 else 4) // 8
        return num_outputs * (of_codes + num_groups * of_scales)

    def numbers(self) -> Tensor:
        """All numbers, of the dtype that `read` gives."""
        read = self.read()
        return read if isinstance(read, Tensor) else read.numbers()

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """All numbers as a network of that dtype keeps them: those of codes as bfloat16 in a
        float32 network, so that they take 2 bytes."""
        numbers = self.numbers()
        if self.is_plain:
            return numbers
        return numbers.to(torch.bfloat16 if dtype is torch.float32 else dtype)

    def part(self, rows: slice, columns: slice) -> "StoredWeight":
        """Some outputs and some inputs, from 0 to the end at most, as a weight of its own.

        It is codes if this one is and no group is cut. Where no part can be read, all is, and cut.
        """
        shape = rows.stop - rows.start, columns.stop - columns.start
        tile, reason = self.tile, self.reason
        if tile is not None and self.cuts_a_group(columns):
            tile, reason = None, CUT_GROUP

        def read() -> CodedWeight | BlockRows | Tensor:
            if self.read_part is not None:
                return self.read_part(rows, columns)
            if tile is not None:
                return self.codes().part(rows, columns)
            return self.numbers()[rows, columns]

        return replace(
            self,
            shape=shape,
            group_inputs=min(self.group_inputs, shape[1]),
            tile=tile,
            reason=reason,
            read=read,
            read_part=None,
            whole=self.whole or self,
        )

    def cuts_a_group(self, columns: slice) -> bool:
        """Is true if these inputs begin inside of a group, or end inside of a block."""
        size = self.group_inputs
        if self.tile is not None and self.tile.is_blocks:
            end = min(columns.stop, self.shape[1])
            return columns.start % size > 0 or end % size > 0
        return size < self.shape[1] and columns.start % size > 0

    def codes(self) -> CodedWeight | BlockRows:
        """The codes; only of a weight with a tile."""
        read = self.read()
        assert not isinstance(read, Tensor), "a tile of numbers"
        return read


@dataclass(frozen=True, slots=True, eq=False)
class StoredParameter:
    """A parameter [E, D], or of experts [X, E, D], that is made of weights of a checkpoint.

    Attributes:
        rows_X: for each expert its weights, one below the other.
        is_stack: it has a first dimension X.
        is_transposed: it is [D, E], or [X, D, E].
        dtype: that of its numbers.
    """

    rows_X: Sequence[Sequence[StoredWeight]]
    is_stack: bool = False
    is_transposed: bool = False
    dtype: torch.dtype = torch.float32

    @property
    def weights(self) -> list[StoredWeight]:
        """The weights that it is made of, expert by expert."""
        return [weight for rows in self.rows_X for weight in rows]

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes of the parameter."""
        sizes = sum(weight.shape[0] for weight in self.rows_X[0]), self.rows_X[0][0].shape[1]
        sizes = (sizes[1], sizes[0]) if self.is_transposed else sizes
        return (len(self.rows_X), *sizes) if self.is_stack else sizes

    @property
    def tile(self) -> WeightFormat | None:
        """The format that keeps the codes of all experts; None: there is none."""
        every = [_common_tile([(one.tile, one.shape[0]) for one in rows]) for rows in self.rows_X]
        return _common_tile([(tile, TILE_OUTPUTS) for tile in every])

    @property
    def coded_bytes(self) -> int:
        """The bytes of all codes and scales."""
        return sum(weight.coded_bytes for weight in self.weights)

    def coded(self, expert: int = 0) -> Codes:
        """The codes of one expert, [E, D]."""
        tile = self.tile
        assert tile is not None, "a parameter of numbers"
        return joined([weight.codes().coded(tile) for weight in self.rows_X[expert]])

    def numbers(self) -> Tensor:
        """The parameter, as `rounded` says; those of one weight after the other are there twice."""
        found = torch.empty(self.shape, dtype=self.dtype)
        stack = found if self.is_stack else found[None]
        for to, weights in zip(stack, self.rows_X, strict=True):
            to_ED = to.T if self.is_transposed else to
            sizes = [weight.shape[0] for weight in weights]
            for part_ED, weight in zip(to_ED.split(sizes), weights, strict=True):
                part_ED.copy_(weight.rounded(self.dtype))
        return found


def below(parts: Sequence[StoredParameter]) -> StoredParameter:
    """One parameter whose rows are those of the parts, one part below the other."""
    experts = zip(*(part.rows_X for part in parts), strict=True)
    rows_X = [[weight for rows in parts for weight in rows] for parts in experts]
    return replace(parts[0], rows_X=rows_X)


def tile_for(
    bits: int, group_inputs: int, num_inputs: int, *, has_zero: bool
) -> WeightFormat | str:
    """The format whose tiles keep such codes and scales as they are, else why there is none."""
    if bits == 8 and has_zero:
        return "tiles of 8 bits have no zero points"
    if bits == 8 and group_inputs >= num_inputs:
        return WeightFormat.INT8
    sizes = [size for size in (128, 32) if group_inputs % size == 0 or group_inputs >= num_inputs]
    if not sizes:
        return f"tiles have groups of 32 and 128 inputs, not of {group_inputs}"
    return _named_tile(is_int8=bits == 8, group_inputs=sizes[0], has_zero=has_zero)


def _named_tile(*, is_int8: bool, group_inputs: int, has_zero: bool) -> WeightFormat:
    size = "-g32" if group_inputs == 32 else "-g128" if is_int8 else ""
    return WeightFormat(f"{'int8' if is_int8 else 'int4'}{size}{'-zero' if has_zero else ''}")


def _common_tile(parts: Sequence[tuple[WeightFormat | None, int]]) -> WeightFormat | None:
    """The format that can keep the codes of all; None: one has no tile, or they do not fit.

    Args:
        parts: of weights one below the other, their tiles and numbers of outputs.
    """
    sizes = [(tile, num_outputs) for tile, num_outputs in parts if tile is not None]
    tiles = [tile for tile, _ in sizes]
    if len(tiles) < len(parts) or len({tile.is_int8 for tile in tiles}) > 1:
        return None
    if len(set(tiles)) == 1:
        return tiles[0]
    if any(tile.is_blocks for tile in tiles):
        fits = all(tile.is_blocks for tile in tiles) and fits_tiles(sizes)
        return WeightFormat.MIXED if fits else None
    return _named_tile(
        is_int8=tiles[0].is_int8,
        group_inputs=min(tile.group_inputs or 128 for tile in tiles),
        has_zero=any(tile.has_zero for tile in tiles),
    )
