"""Products with weights that are kept as bfloat16 and multiplied in float32, on any CPU.

A step reads every weight once, so half the bytes are half the time. For a float32 model whose
weights all fit bfloat16, as those of most checkpoints do, this is the same function as float32
weights; a bfloat16 model gets float32 sums, rounded once.

Up to eight rows cost little more than one. A row's result does not depend on the rows beside it,
bit for bit: verifying drafts and decoding agree exactly.

Dimension key: T rows, D inputs, E outputs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from outdraft.models.layers.linear_kernels import multiply_together
from outdraft.models.layers.linear_simd import TILE
from outdraft.models.layers.linear_team import Team


def fits_bfloat16(weight_ED: Tensor) -> bool:
    """Whether every number is the same in bfloat16; False for a weight with NaN."""
    return torch.equal(weight_ED, weight_ED.bfloat16().to(weight_ED.dtype))


def pack_tiles(weight_ED: Tensor) -> Tensor:
    """int16 [tiles, D / 2, TILE, 2], of the bits of bfloat16; what is missing is zero.

    The two innermost weights belong to neighbouring inputs and one output: in a word of 32 bits
    they are the low and the high half, and become float32 with a shift and a mask.
    """
    num_outputs, num_inputs = weight_ED.shape
    padding = (0, num_inputs % 2, 0, -num_outputs % TILE)
    words_EDP = F.pad(weight_ED.bfloat16(), padding).view(torch.int16)
    tiles = words_EDP.unflatten(0, (-1, TILE)).unflatten(2, (-1, 2))
    return tiles.permute(0, 2, 1, 3).contiguous()


class Bf16Product:
    """x -> x W^T + b in x's dtype, which is the dtype that W and b came in.

    Args:
        weight_ED: float32 whose numbers fit bfloat16, or bfloat16; on the CPU.
        team: the threads that share the work; None: the calling thread works alone.
    """

    def __init__(self, weight_ED: Tensor, bias_E: Tensor | None, team: Team | None) -> None:
        self._dtype = weight_ED.dtype
        self._num_outputs, self._num_inputs = weight_ED.shape
        self._tiles = pack_tiles(weight_ED)
        self._bias_E = None if bias_E is None else bias_E.detach().float().contiguous()
        self._team = team
        self._team_address = 0 if team is None else team.address
        self._addresses = (
            self._tiles.data_ptr(),
            0 if self._bias_E is None else self._bias_E.data_ptr(),
        )
        if team is not None:
            team.reserve(self._num_inputs)
            team.lend(self, self._tiles)

    @property
    def nbytes(self) -> int:
        """Size of the packed weight."""
        return self._tiles.nbytes

    def addresses(self) -> tuple[int, int]:
        """Where weights and bias are, for linear_kernels; valid while this object lives."""
        return self._addresses

    def __call__(self, x_TD: Tensor) -> Tensor:
        """[T, E]."""
        num_rows, num_inputs = x_TD.shape
        assert x_TD.dtype is self._dtype, f"expected {self._dtype}, got {x_TD.dtype}"
        assert num_inputs == self._num_inputs, f"expected {self._num_inputs}, got {num_inputs}"
        if x_TD.stride(1) != 1:
            x_TD = x_TD.contiguous()
        out_TE = torch.empty((num_rows, self._num_outputs), dtype=self._dtype)
        multiply_together(
            self._team_address,
            *self._addresses,
            x_TD.data_ptr(),
            x_TD.stride(0),
            out_TE.data_ptr(),
            num_rows,
            num_inputs,
            self._num_outputs,
            self._dtype is torch.bfloat16,
        )
        return out_TE
