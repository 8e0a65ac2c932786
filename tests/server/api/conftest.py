"""One server for all tests that do not change it."""

import pytest

from tests.server.api.fake_engine import FakeEngine
from tests.server.api.serving import serve


@pytest.fixture(scope="session")
def served():
    with serve(FakeEngine()) as running:
        yield running


@pytest.fixture(scope="session")
def client(served):
    return served.client()
