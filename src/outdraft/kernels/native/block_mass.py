"""How much of a row's attention each block of its text gets, by the compiled library.

Dimension key: B requests, H heads, G kv heads, C head size, P blocks, S slots per block.
"""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from outdraft.kernels.native.arrays import Addresses, address_of
from outdraft.kernels.native.team import Team


class _Task(ctypes.Structure):
    """As `MassTask` of csrc/block_mass.cpp."""

    _fields_ = (
        *((name, c_void_p) for name in ("q", "k", "block_table", "num_keys", "mass")),
        *((name, c_int64) for name in ("num_requests", "num_heads", "num_kv_heads", "head_size")),
        *((name, c_int64) for name in ("block_size", "table_width")),
        ("scale", c_float),
        *((name, c_int32) for name in ("is_bf16", "is_bf16_query")),
    )


class NativeBlockMass:
    """As `ops.BlockMass`, for float32 and bfloat16 on the CPU; scores and sums are float32."""

    def __init__(self, team: Team) -> None:
        arguments = [c_void_p, POINTER(_Task)]
        self._block_mass = team.library.function("block_mass", arguments, releases_gil=True)
        self._team = team

    def __call__(
        self,
        q_BHC: Tensor,
        k_PSGC: Tensor,
        block_table_BP: Tensor,
        num_keys_B: Tensor,
        scale: float,
    ) -> Tensor:
        at, (num_requests, num_heads, head_size) = Addresses(), q_BHC.shape
        num_blocks = block_table_BP.shape[1]
        mass_BP = torch.zeros(num_requests, num_blocks)
        task = _Task(
            at(q_BHC.float(), torch.float32),
            address_of(k_PSGC, k_PSGC.dtype),
            at(block_table_BP, torch.int32),
            at(num_keys_B, torch.int64),
            mass_BP.data_ptr(),
            num_requests,
            num_heads,
            k_PSGC.shape[2],
            head_size,
            k_PSGC.shape[1],
            num_blocks,
            scale,
            k_PSGC.dtype is torch.bfloat16,
            q_BHC.dtype is torch.bfloat16,
        )
        self._block_mass(self._team.address, ctypes.byref(task))
        return mass_BP
