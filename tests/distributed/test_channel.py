"""What rank 0 says arrives at all ranks in order, and nobody else is heard."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from outdraft.core.errors import RanksError
from outdraft.ranks.messages import CODE_BYTES, Listener, Speaker

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
WAIT_S = 60.0


@pytest.fixture(params=["ipc", "tcp"])
def address(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/ranks" if request.param == "ipc" else "tcp://127.0.0.1:*"


@pytest.fixture
def raw() -> Iterator[zmq.Socket[bytes]]:
    """From somebody who has no key."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = int(WAIT_S * 1000)
        yield socket


def met(speaker: Speaker, listeners: list[Listener]) -> None:
    """All ranks are known to rank 0."""
    for listener in listeners:
        listener.send(b"here")
    said = [speaker.receive(WAIT_S) for _ in listeners]
    assert sorted(said) == [(rank, b"here") for rank in range(1, 1 + len(listeners))]


def test_all_ranks_hear_every_message_in_order(address: str):
    messages = [b"%d" % number * (1 + number % 50) for number in range(500)]
    heard: dict[int, list[bytes]] = {}

    def listen(rank: int, at: str) -> None:
        with closing(Listener(KEY, rank, at)) as listener:
            listener.send(b"here")
            heard[rank] = [listener.receive() for _ in messages]

    with closing(Speaker(KEY, 4, address)) as speaker:
        ranks = [
            threading.Thread(target=listen, args=(rank, speaker.address)) for rank in (1, 2, 3)
        ]
        for rank in ranks:
            rank.start()
        come = sorted(speaker.receive(WAIT_S) for _ in ranks)
        for message in messages:
            speaker.send(message)
        for rank in ranks:
            rank.join()
    assert come == [(1, b"here"), (2, b"here"), (3, b"here")]
    assert heard == dict.fromkeys((1, 2, 3), messages)


def test_rank_0_hears_each_rank_in_order_and_knows_who_it_was(address: str):
    with (
        closing(Speaker(KEY, 3, address)) as speaker,
        closing(Listener(KEY, 1, speaker.address)) as one,
        closing(Listener(KEY, 2, speaker.address)) as two,
    ):
        for number in range(20):
            one.send(b"one %d" % number)
            two.send(b"two %d" % number)
        said = [speaker.receive(WAIT_S) for _ in range(40)]
        assert speaker.receive(0.0) is None
    for rank, name in ((1, "one"), (2, "two")):
        own = [message.decode() for who, message in said if who == rank]
        assert own == [f"{name} {number}" for number in range(20)]


def test_whoever_has_another_key_is_not_heard(
    address: str, raw: zmq.Socket[bytes], caplog: pytest.LogCaptureFixture
):
    with (
        closing(Speaker(KEY, 2, address)) as speaker,
        closing(Listener(OTHER_KEY, 1, speaker.address)) as stranger,
        closing(Listener(KEY, 1, speaker.address)) as rank,
    ):
        raw.connect(speaker.address)
        raw.send_multipart([b"x", b"y"])
        stranger.send(b"here")
        assert speaker.receive(0.5) is None
        assert "no rank of this engine" in caplog.text
        met(speaker, [rank])
        speaker.send(b"plan")
        assert rank.receive() == b"plan"


def test_a_message_is_heard_once_however_often_it_is_sent(address: str, raw: zmq.Socket[bytes]):
    with closing(Speaker(KEY, 2, address)) as speaker:
        with closing(Listener(KEY, 1, speaker.address)) as rank:
            sealed = rank._own.sealed(b"here")
        raw.connect(speaker.address)
        raw.send(sealed)
        raw.send(sealed)
        assert speaker.receive(WAIT_S) == (1, b"here")
        assert speaker.receive(0.5) is None


@pytest.mark.parametrize("change", ["text", "code", "order"])
def test_a_rank_refuses_what_rank_0_did_not_say_next(address: str, raw, change: str):
    with zmq.Context() as context, context.socket(zmq.ROUTER) as between:
        between.linger = 0
        between.rcvtimeo = int(WAIT_S * 1000)
        between.bind(address)
        with closing(Listener(KEY, 1, between.last_endpoint.decode())) as rank:
            rank.send(b"here")
            route, _ = between.recv_multipart()
            stamp = type(rank._own)(KEY, 0)
            first, second = stamp.sealed(b"first"), stamp.sealed(b"second")
            changed = {
                "text": first[:-1] + b"!",
                "code": bytes(CODE_BYTES) + first[CODE_BYTES:],
                "order": second,
            }
            between.send_multipart([route, changed[change]])
            with pytest.raises(RanksError, match="not rank 0's next one"):
                rank.receive()


def test_a_rank_that_has_gone_is_noticed_when_it_is_told_something(address: str):
    with closing(Speaker(KEY, 2, address)) as speaker:
        with closing(Listener(KEY, 1, speaker.address)) as rank:
            met(speaker, [rank])

        def tell_it() -> None:
            for _ in range(1000):  # its end takes a moment to arrive
                speaker.send(b"plan")
                speaker.receive(0.01)

        with pytest.raises(RanksError, match="rank 1 has gone"):
            tell_it()
