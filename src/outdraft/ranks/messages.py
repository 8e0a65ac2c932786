"""The messages between rank 0 and the other ranks of an engine; msgpack on the wire.

While an engine starts, each order of rank 0 has an answer of every rank. Steps have none: ranks
meet in their groups. A rank's assignment and an engine's configuration are pickled: both come from
the process that started it. Plans are written as rows of their fields, without names: all ranks run
the same version.

The channel carries messages from rank 0 to all other ranks, in order, and only between them. Rank 0
listens; the others connect and say who they are. Messages are encrypted (ZeroMQ's CURVE). Rank 0's
public key is given to the engine's ranks alone: without it a process can neither join nor read,
insert, change or repeat a message.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import zmq
from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import RanksError
from outdraft.core.grammar import AllowedTokens
from outdraft.core.plan import StepPlan
from outdraft.loading.machine import Cores
from outdraft.loading.memory import MemoryPlan

LOST = 3  # exit code of a rank that lost another one
STORE_TIMEOUT_S = 300.0  # for all processes to come
MAX_ANSWER_BYTES = 1 << 20  # of a message to rank 0


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """The settings that a rank's process is started with.

    Attributes:
        address, key: of rank 0's end of the channel.
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


Answer = Done | RankFailed
# The answer is on its way: this rank has computed or read since its last message.
WORKING = b""


def _array_as_bytes(array: Any) -> bytes:
    """Write an array of int32, the only kind that messages have."""
    assert isinstance(array, np.ndarray)
    assert array.dtype == np.int32
    return array.tobytes()


def _array_of_bytes(_: type, data: bytes) -> np.ndarray:
    return np.frombuffer(data, np.int32).copy()


as_bytes = Encoder(enc_hook=_array_as_bytes).encode
order_of_bytes = Decoder(Order, dec_hook=_array_of_bytes).decode
answer_of_bytes = Decoder(Answer).decode


class Speaker:
    """Rank 0's end. It belongs to one thread at a time.

    Attributes:
        address: that the others connect to.
        key: that they need for it, 40 characters.
    """

    def __init__(self, size: int, address: str) -> None:
        """
        Args:
            size: ranks, this one included.
            address: of ZeroMQ; a port `*` is chosen.
        """
        self._size = size
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a rank that left is an error
        self.key, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def send(self, message: bytes) -> None:
        """Send to all ranks, each of which must have sent a message before. Never waits.

        Raises:
            RanksError: one of them has closed its end.
        """
        for rank in range(1, self._size):
            try:
                self._socket.send_multipart([b"%d" % rank, message])
            except zmq.ZMQError as error:
                raise RanksError(f"rank {rank} has gone: {error}") from error

    def receive(self, timeout_s: float) -> tuple[int, bytes] | None:
        """Receive (rank, message) from any rank; None: nothing came in time."""
        if not self._socket.poll(round(timeout_s * 1000)):
            return None
        rank, message = self._socket.recv_multipart()
        return int(rank), message

    def close(self) -> None:
        """Free the address, without a message to the others."""
        self._socket.close()
        self._context.term()


class Listener:
    """The end of another rank."""

    def __init__(self, key: bytes, rank: int, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.linger = 1000  # ms, for its last words
        self._socket.reconnect_ivl = -1  # what a broken connection lost does not come again
        self._socket.setsockopt(zmq.ROUTING_ID, b"%d" % rank)
        self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_serverkey = key
        self._socket.connect(address)

    def send(self, message: bytes) -> None:
        """Send to rank 0; never waits. The first message registers this rank."""
        self._socket.send(message)

    def receive(self) -> bytes:
        """Wait for rank 0's next message."""
        return self._socket.recv()

    def close(self) -> None:
        """Close once the last message has left, or 1 s later."""
        self._socket.close()
        self._context.term()
