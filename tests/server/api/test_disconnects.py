"""A client that leaves ends its work, wherever it was."""

import httpx
import pytest

from tests.server.api.fake_engine import FakeEngine
from tests.server.api.serving import serve, wait_until


@pytest.mark.parametrize("stall_at", [0, 2])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["a", ["a", "b", "c"]])
def test_every_request_of_a_client_that_left_is_aborted(stream, stall_at, prompt):
    num_prompts = len(prompt)
    with serve(FakeEngine(stall_at=stall_at)) as served:
        timeout = httpx.Timeout(5, read=0.15)
        body = {"prompt": prompt, "stream": stream}
        with pytest.raises(httpx.ReadTimeout):
            served.post("/v1/completions", json=body, timeout=timeout)
        wait_until(lambda: len(served.engine.aborted) == num_prompts)
        assert sorted(served.engine.aborted) == sorted(served.engine.started)


def test_leaving_in_mid_stream_aborts():
    with serve(FakeEngine(stall_at=3)) as served:
        client = served.client()
        stream = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "a"}], stream=True
        )
        next(iter(stream))
        assert not served.engine.aborted
        stream.close()
        wait_until(lambda: served.engine.aborted)


def test_a_request_that_ended_is_not_aborted(served, client):
    before = len(served.engine.aborted)
    list(client.completions.create(model="tiny", prompt="a", stream=True))
    client.completions.create(model="tiny", prompt=["a", "b"])
    assert len(served.engine.aborted) == before
