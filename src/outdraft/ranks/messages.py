"""The messages between rank 0 and the other ranks of an engine; msgpack on the wire.

While an engine starts, each order of rank 0 has an answer of every rank. Steps have none: ranks
meet in their groups. A rank's assignment and an engine's configuration are pickled: both come from
the process that started it. Plans are written as rows of their fields, without names: all ranks run
the same version.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, Encoder

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import RanksError
from outdraft.core.grammar import AllowedTokens
from outdraft.core.plan import StepPlan
from outdraft.loading.machine import Cores
from outdraft.loading.memory import MemoryPlan

LOST = 3  # exit code of a rank that lost another one
STORE_TIMEOUT_S = 300.0  # for all processes to come


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The settings that a rank's process is started with.

    Attributes:
        address: of rank 0's end of the channel.
        store: host and port where the ranks' groups meet.
        log_level: of the logging module, in letters.
        host: address of the rank's machine.
        device_index: among the GPUs that its process sees; None: it has none.
    """

    config: EngineConfig
    rank: int
    address: str
    key: bytes
    store: tuple[str, int]
    cores: Cores
    log_level: str
    host: str
    device_index: int | None


class Join(Struct, tag=True, frozen=True):
    """All ranks are there: meet, and load the models."""


class Prepare(Struct, tag=True, frozen=True):
    """Plan the memory of an engine of the loaded models. The answers have the plans."""

    pickled_config: bytes


class Build(Struct, tag=True, frozen=True):
    """Take that memory, with `num_blocks` blocks."""

    num_blocks: int


class RunStep(Struct, tag=True, frozen=True):
    """Run a step, up to the place where it needs masks if it does."""

    plan: StepPlan


class Masks(Struct, tag=True, frozen=True):
    """Run the rest of a step, with these AllowedTokens; rows that allow everything are left out.

    Attributes:
        shape: of all masks.
        rows: int32, the others' places.
        masks: int32, of these rows.
        ends: int32, `ends_2E`.
    """

    shape: tuple[int, int]
    rows: np.ndarray
    masks: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, allowed: AllowedTokens) -> "Masks":
        masks_RW = allowed.masks_RW
        rows = np.flatnonzero((masks_RW != -1).any(axis=1)).astype(np.int32)
        return cls(masks_RW.shape, rows, masks_RW[rows], allowed.ends_2E.astype(np.int32))

    @property
    def allowed(self) -> AllowedTokens:
        masks_RW = np.full(self.shape, -1, dtype=np.int32)
        masks_RW[self.rows] = self.masks.reshape(-1, self.shape[1])
        return AllowedTokens(masks_RW, self.ends.reshape(2, -1).astype(np.int64))


Order = Join | Prepare | Build | RunStep | Masks


class Working(Struct, tag=True, frozen=True):
    """The answer is on its way: this rank has computed or read since its last message."""


class Done(Struct, tag=True, frozen=True):
    """The order is carried out. The first message of a rank says so of its start.

    plan: the memory of the engine as this rank plans it, before the ranks agree; else None.
    """

    plan: MemoryPlan | None = None


class RankFailed(Struct, tag=True, frozen=True):
    """The last message of a rank.

    `kind`: "config" if the configuration is to blame, "ranks" if another rank is, else "rank".
    """

    kind: str
    message: str


Answer = Working | Done | RankFailed


def _array_as_bytes(array: Any) -> bytes:
    """Write an array of int32, the only kind that messages have."""
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.int32
    return array.tobytes()


def _array_of_bytes(_: type, data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int32).copy()


_encoder = Encoder(enc_hook=_array_as_bytes)
_orders, _answers = Decoder(Order, dec_hook=_array_of_bytes), Decoder(Answer)


def as_bytes(message: Order | Answer) -> bytes:
    return _encoder.encode(message)


def order_of_bytes(data: bytes) -> Order:
    """Decode an order. Raises RanksError: it is none."""
    try:
        return _orders.decode(data)
    except (MsgspecError, TypeError, ValueError) as error:
        raise RanksError(f"an order cannot be read: {error}") from error


def answer_of_bytes(data: bytes) -> Answer:
    """Decode an answer. Raises RanksError: it is none."""
    try:
        return _answers.decode(data)
    except MsgspecError as error:
        raise RanksError(f"an answer cannot be read: {error}") from error
