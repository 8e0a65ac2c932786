"""What a front end and the relays of its replicas tell each other, over TCP.

Every message is two frames: what it is, and msgpack. The engine's own commands and reports pass as
they are. Connections are encrypted with keys of ZeroMQ (CURVE). The front end's public key is told
to its replicas only: whoever does not know it gets no connection.
"""

from dataclasses import dataclass

from msgspec import Struct

# Relay to front end.
HELLO, REPORTS, GONE, LEAVING = b"hello", b"reports", b"gone", b"leaving"
# Front end to relay.
COMMAND, END = b"command", b"end"
# Both ways.
BEAT = b"beat"

BEAT_S = 0.5


class Hello(Struct, frozen=True):
    """The first message of a relay."""

    node: str  # the machine's address
    clock_s: float  # monotonic clock of the relay's machine


class Beat(Struct, frozen=True):
    """A sign of life, every BEAT_S seconds."""

    clock_s: float  # as in Hello
    num_sent: int  # reports or commands so far; whoever has received fewer has lost some
    num_requests: int = 0  # that the front end has open at the replica


class Gone(Struct, frozen=True):
    """The last message of a relay: its engine has ended."""

    cause: str


@dataclass(frozen=True, slots=True)
class Address:
    """Where relays find the front end.

    Attributes:
        url: as ZeroMQ writes it, tcp://10.0.0.1:5555.
        public_key: of the front end; 40 characters.
    """

    url: str
    public_key: bytes


class Silence:
    """For how long nothing was heard. Time in which nobody listened hardly counts.

    A process that was stopped for a while finds its peers' messages when it goes on: it must not
    think before it has read them that they were silent.
    """

    def __init__(self) -> None:
        self._silent_s = 0.0
        self._last_s: float | None = None

    def heard(self) -> None:
        self._silent_s = 0.0

    def passed(self, now_s: float) -> float:
        """Called every BEAT_S seconds. Seconds of silence; `now_s`: of the monotonic clock."""
        if self._last_s is not None:
            self._silent_s += min(now_s - self._last_s, 2 * BEAT_S)
        self._last_s = now_s
        return self._silent_s
