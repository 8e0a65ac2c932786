"""Requests made up from the served OpenAPI document, against the real engine."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.server.served import Server, serving, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("end_to_end")]

EXAMPLES = 15  # an operation


@pytest.fixture
def server(tmp_path: Path):
    with serving(tmp_path, "--dtype", "float32", "--max-model-len", "128") as running:
        yield running


def test_no_made_up_request_is_a_server_error_or_hangs(server: Server):
    command = [Path(sys.executable).with_name("schemathesis"), "run"]
    command += [f"{server.url}/openapi.json", "--checks", "not_a_server_error"]
    command += ["--max-examples", str(EXAMPLES), "--seed", "1", "--request-timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-4000:]
    wait_for(lambda: server.metrics()["num_requests_running"] == 0)
    assert server.complete(max_tokens=3).status_code == 200
