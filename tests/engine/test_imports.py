"""The engine runs where the libraries of the server and the command line are not installed."""

import subprocess
import sys

import pytest

PROGRAM = """
import sys

class Missing:
    NAMES = ("fastapi", "httpx", "llguidance", "prometheus_client", "pydantic", "rich",
             "typer", "uvicorn", "zmq")

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.NAMES:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
import outdraft.engine.async_engine
import outdraft.engine.llm
"""


@pytest.mark.slow
def test_the_engine_needs_none_of_their_libraries():
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
