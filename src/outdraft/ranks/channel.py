"""Carries messages from rank 0 to all other ranks, in order, and only between them.

Rank 0 listens; the others connect and say who they are. Every message carries its number and a
code that only the holders of the engine's key can make (BLAKE2 with a key, RFC 7693): without the
key a process can neither join nor insert, change or repeat a message. Contents are not encrypted.
"""

import logging
from hashlib import blake2b
from hmac import compare_digest

import zmq

from outdraft.core.errors import RanksError

CODE_BYTES, KEY_BYTES = 16, 32
MAX_ANSWER_BYTES = 1 << 20  # of a message to rank 0
_logger = logging.getLogger(__name__)


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
