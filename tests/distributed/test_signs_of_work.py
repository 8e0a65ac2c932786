"""Who works shows it, and who waits does not."""

import threading
import time

from outdraft.ranks import worker
from outdraft.ranks.messages import WORKING
from outdraft.ranks.worker import signs_of_work


class Ear:
    """Keeps what it is sent."""

    def __init__(self) -> None:
        self.heard: list[bytes] = []
        self.has_heard = threading.Event()

    def send(self, message: bytes) -> None:
        self.heard.append(message)
        self.has_heard.set()


def test_a_process_that_computes_tells_it_until_it_is_done(monkeypatch):
    monkeypatch.setattr(worker, "BEAT_S", 0.05)
    ear = Ear()
    with signs_of_work(ear):
        while not ear.has_heard.is_set():
            sum(range(10_000))
    told = len(ear.heard)
    assert set(ear.heard) == {WORKING}
    time.sleep(0.2)
    assert len(ear.heard) == told


def test_a_process_that_neither_computes_nor_reads_tells_nothing(monkeypatch):
    monkeypatch.setattr(worker, "BEAT_S", 0.01)
    monkeypatch.setattr(worker, "_used", lambda: (1.0, 7))
    ear = Ear()
    with signs_of_work(ear):
        assert not ear.has_heard.wait(0.2)
