"""The messages between rank 0 and the other ranks of an engine; msgpack on the wire.

While an engine starts, each order of rank 0 has an answer of every rank. Steps have none: ranks
meet in their groups. A rank's assignment and an engine's configuration are pickled: both come from
the process that started it.
"""

import pickle
from dataclasses import dataclass

from msgspec import MsgspecError, Struct
from msgspec.msgpack import Decoder, encode

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import RanksError
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
    """All ranks are there: meet, and load the models. They answer Loaded."""


class Prepare(Struct, tag=True, frozen=True):
    """Plan the memory of an engine of the loaded models. They answer Planned."""

    pickled_config: bytes

    @classmethod
    def of(cls, config: EngineConfig) -> "Prepare":
        return cls(pickle.dumps(config))

    @property
    def config(self) -> EngineConfig:
        return pickle.loads(self.pickled_config)


class Build(Struct, tag=True, frozen=True):
    """Take that memory, with `num_blocks` blocks. They answer Ready."""

    num_blocks: int


class RunStep(Struct, tag=True, frozen=True):
    """Run a step, up to the place where it needs masks if it does."""

    plan: bytes  # as distributed.plan_bytes writes it


class Masks(Struct, tag=True, frozen=True):
    """Run the rest of a step."""

    allowed: bytes


Order = Join | Prepare | Build | RunStep | Masks


class Here(Struct, tag=True, frozen=True):
    """The first message of a rank."""


class Working(Struct, tag=True, frozen=True):
    """The answer is on its way: this rank has computed or read since its last message."""


class Loaded(Struct, tag=True, frozen=True):
    """The models are there."""


class Planned(Struct, tag=True, frozen=True):
    """The memory of the engine as this rank plans it, before the ranks agree."""

    plan: MemoryPlan


class Ready(Struct, tag=True, frozen=True):
    """Steps may come."""


class RankFailed(Struct, tag=True, frozen=True):
    """The last message of a rank.

    `kind`: "config" if the configuration is to blame, "ranks" if another rank is, else "rank".
    """

    kind: str
    message: str


Answer = Here | Working | Loaded | Planned | Ready | RankFailed

_orders, _answers = Decoder(Order), Decoder(Answer)


def as_bytes(message: Order | Answer) -> bytes:
    return encode(message)


def order_of_bytes(data: bytes) -> Order:
    """Decode an order. Raises RanksError: it is none."""
    try:
        return _orders.decode(data)
    except MsgspecError as error:
        raise RanksError(f"an order cannot be read: {error}") from error


def answer_of_bytes(data: bytes) -> Answer:
    """Decode an answer. Raises RanksError: it is none."""
    try:
        return _answers.decode(data)
    except MsgspecError as error:
        raise RanksError(f"an answer cannot be read: {error}") from error
