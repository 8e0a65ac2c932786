"""What rank 0 says arrives at all ranks in order, and nobody else is heard."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from outdraft.core.errors import RanksError
from outdraft.ranks.messages import Listener, Speaker

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

    def listen(rank: int, speaker: Speaker) -> None:
        with closing(Listener(speaker.key, rank, speaker.address)) as listener:
            listener.send(b"here")
            heard[rank] = [listener.receive() for _ in messages]

    with closing(Speaker(4, address)) as speaker:
        ranks = [threading.Thread(target=listen, args=(rank, speaker)) for rank in (1, 2, 3)]
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
        closing(Speaker(3, address)) as speaker,
        closing(Listener(speaker.key, 1, speaker.address)) as one,
        closing(Listener(speaker.key, 2, speaker.address)) as two,
    ):
        for number in range(20):
            one.send(b"one %d" % number)
            two.send(b"two %d" % number)
        said = [speaker.receive(WAIT_S) for _ in range(40)]
        assert speaker.receive(0.0) is None
    for rank, name in ((1, "one"), (2, "two")):
        own = [message.decode() for who, message in said if who == rank]
        assert own == [f"{name} {number}" for number in range(20)]


def test_a_process_without_the_key_is_not_heard(address: str, raw: zmq.Socket[bytes]):
    other_key, _ = zmq.curve_keypair()
    with (
        closing(Speaker(2, address)) as speaker,
        closing(Listener(other_key, 1, speaker.address)) as stranger,
        closing(Listener(speaker.key, 1, speaker.address)) as rank,
    ):
        raw.setsockopt(zmq.ROUTING_ID, b"1")
        raw.connect(speaker.address)
        raw.send(b"here")
        stranger.send(b"here")
        assert speaker.receive(0.5) is None
        met(speaker, [rank])
        speaker.send(b"plan")
        assert rank.receive() == b"plan"
        raw.rcvtimeo = 200
        with pytest.raises(zmq.Again):
            raw.recv()


def test_rank_0_is_believed_for_its_key_only(address: str):
    key, _ = zmq.curve_keypair()
    with zmq.Context() as context, context.socket(zmq.ROUTER) as impostor:
        impostor.linger = 0
        _, impostor.curve_secretkey = zmq.curve_keypair()
        impostor.curve_server = True
        impostor.bind(address)
        with closing(Listener(key, 1, impostor.last_endpoint.decode())) as rank:
            rank.send(b"here")
            assert not impostor.poll(500)


def test_a_rank_that_has_gone_is_noticed_when_it_is_told_something(address: str):
    with closing(Speaker(2, address)) as speaker:
        with closing(Listener(speaker.key, 1, speaker.address)) as rank:
            met(speaker, [rank])

        def tell_it() -> None:
            for _ in range(1000):  # its end takes a moment to arrive
                speaker.send(b"plan")
                speaker.receive(0.01)

        with pytest.raises(RanksError, match="rank 1 has gone"):
            tell_it()
