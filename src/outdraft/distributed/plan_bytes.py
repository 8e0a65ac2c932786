"""Writes and reads the bytes that rank 0 sends the other ranks for a step.

Values are written as rows of their fields, without names: all ranks run the same version.
"""

from typing import Any

import numpy as np
from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from outdraft.core.errors import RanksError
from outdraft.core.grammar import AllowedTokens
from outdraft.core.plan import StepPlan


class _WrittenAllowed(Struct, array_like=True, frozen=True):
    """AllowedTokens; rows that allow everything are left out.

    Attributes:
        shape: of all masks.
        rows: int32, the others' places.
        masks, ends: int32 and int64.
    """

    shape: tuple[int, int]
    rows: bytes
    masks: bytes
    ends: bytes


def _array_as_bytes(array: Any) -> bytes:
    """Write an array of tokens, the only kind that a plan has."""
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.int32
    return array.tobytes()


def _array_of_bytes(_: type, data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int32).copy()


_encoder = Encoder(enc_hook=_array_as_bytes)
_plans, _masks = Decoder(StepPlan, dec_hook=_array_of_bytes), Decoder(_WrittenAllowed)


def plan_as_bytes(plan: StepPlan) -> bytes:
    """Write a plan for `plan_of_bytes`."""
    return _encoder.encode(plan)


def plan_of_bytes(data: bytes) -> StepPlan:
    """Read a plan.

    Raises:
        RanksError: these bytes are no plan.
    """
    try:
        return _plans.decode(data)
    except (MsgspecError, TypeError, ValueError) as error:
        raise RanksError(f"a plan cannot be read: {error}") from error


def allowed_as_bytes(allowed: AllowedTokens) -> bytes:
    """Write masks for `allowed_of_bytes`."""
    masks_RW, ends_2E = allowed.masks_RW, allowed.ends_2E
    rows = np.flatnonzero((masks_RW != -1).any(axis=1)).astype(np.int32)
    shape, masks = masks_RW.shape, masks_RW[rows]
    return _encoder.encode(
        _WrittenAllowed(shape, rows.tobytes(), masks.tobytes(), ends_2E.tobytes())
    )


def allowed_of_bytes(data: bytes) -> AllowedTokens:
    """Read masks.

    Raises:
        RanksError: these bytes are no masks.
    """
    try:
        written = _masks.decode(data)
        masks_RW = np.full(written.shape, -1, dtype=np.int32)
        rows = np.frombuffer(written.rows, np.int32)
        masks_RW[rows] = np.frombuffer(written.masks, np.int32).reshape(-1, written.shape[1])
        ends_2E = np.frombuffer(written.ends, np.int64).reshape(2, -1).copy()
        return AllowedTokens(masks_RW, ends_2E)
    except (MsgspecError, ValueError, IndexError) as error:
        raise RanksError(f"masks cannot be read: {error}") from error
