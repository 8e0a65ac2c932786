"""The messages between rank 0 and the other ranks of an engine; msgpack on the wire.

While an engine starts, each order of rank 0 has an answer of every rank. Steps have none: ranks
meet in their groups. A rank's assignment and an engine's configuration are pickled: both come from
the process that started it. Plans are written as rows of their fields, without names: all ranks run
the same version.

The channel carries messages from rank 0 to all other ranks, in order, and only between them. Rank 0
listens; the others connect and say who they are. Every message carries its number and a code that
only the holders of the engine's key can make (BLAKE2 with a key, RFC 7693): without the key a
process can neither join nor insert, change or repeat a message. Contents are not encrypted.
"""

import logging
from dataclasses import dataclass
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

import numpy as np
import zmq
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
CODE_BYTES, KEY_BYTES = 16, 32
MAX_ANSWER_BYTES = 1 << 20  # of a message to rank 0
_logger = logging.getLogger(__name__)


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


class _Stamp:
    """The code and number that stand before the messages of one sender."""

    def __init__(self, key: bytes, sender: int) -> None:
        self._key, self._sender, self._number = key, sender, 0

    def sealed(self, message: bytes) -> bytes:
        code = self._code(message)
        self._number += 1
        return code + message

    def opened(self, sealed: bytes) -> bytes | None:
        """Check and return the message; None: it is not the sender's next one."""
        message = sealed[CODE_BYTES:]
        if not compare_digest(sealed[:CODE_BYTES], self._code(message)):
            return None
        self._number += 1
        return message

    def _code(self, message: bytes) -> bytes:
        code = blake2b(key=self._key, digest_size=CODE_BYTES)
        code.update(self._sender.to_bytes(4, "little") + self._number.to_bytes(8, "little"))
        code.update(message)
        return code.digest()


class Speaker:
    """Rank 0's end. It belongs to one thread at a time.

    Attributes:
        address: that the others connect to.
    """

    def __init__(self, key: bytes, size: int, address: str) -> None:
        """
        Args:
            size: ranks, this one included.
            address: of ZeroMQ; a port `*` is chosen.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_ANSWER_BYTES)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a rank that left is an error
        self._socket.bind(address)
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._own = _Stamp(key, 0)
        self._theirs = {rank: _Stamp(key, rank) for rank in range(1, size)}
        self._routes: dict[int, bytes] = {}

    def send(self, message: bytes) -> None:
        """Send to all ranks, each of which must have sent a message before. Never waits.

        Raises:
            RanksError: one of them has closed its end.
        """
        assert len(self._routes) == len(self._theirs), "not all ranks have come"
        sealed = self._own.sealed(message)
        for rank, route in self._routes.items():
            try:
                self._socket.send_multipart([route, sealed])
            except zmq.ZMQError as error:
                raise RanksError(f"rank {rank} has gone: {error}") from error

    def receive(self, timeout_s: float) -> tuple[int, bytes] | None:
        """Receive (rank, message) from any rank; None: nothing came in time."""
        while self._socket.poll(round(timeout_s * 1000)):
            route, *frames = self._socket.recv_multipart()
            sealed = b"".join(frames)
            for rank, stamp in self._theirs.items():
                if self._routes.get(rank, route) != route:
                    continue
                if (message := stamp.opened(sealed)) is not None:
                    self._routes[rank] = route
                    return rank, message
            _logger.warning("a process that is no rank of this engine sends to its ranks")
        return None

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
        self._socket.connect(address)
        self._own, self._theirs = _Stamp(key, rank), _Stamp(key, 0)

    def send(self, message: bytes) -> None:
        """Send to rank 0; never waits. The first message registers this rank."""
        self._socket.send(self._own.sealed(message))

    def receive(self) -> bytes:
        """Wait for rank 0's next message.

        Raises:
            RanksError: it is not from rank 0.
        """
        message = self._theirs.opened(self._socket.recv())
        if message is None:
            raise RanksError("a message that is not rank 0's next one")
        return message

    def close(self) -> None:
        """Close once the last message has left, or 1 s later."""
        self._socket.close()
        self._context.term()
