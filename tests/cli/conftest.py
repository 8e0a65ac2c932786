"""The command line without a terminal, and an installation whose embedded pair is tiny."""

import json
from collections.abc import Iterator

import pytest
import torch
from typer.testing import CliRunner

from outdraft import assets
from tests.cli.pair import PROMPTS, Pair, pair
from tests.logging_state import loggers_put_back


@pytest.fixture(name="pair")
def _pair() -> Pair:
    return pair()


@pytest.fixture
def command(monkeypatch) -> Iterator[CliRunner]:
    threads = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", str(threads))
    with loggers_put_back():  # `serve` would leave a handler for a stream that is closed
        yield CliRunner()
    torch.set_num_threads(threads)


@pytest.fixture
def embedded(monkeypatch, tmp_path, pair) -> Pair:
    """The package's assets are the tiny pair."""
    (tmp_path / "target").symlink_to(pair.target)
    (tmp_path / "drafter").symlink_to(pair.drafter)
    entries = [{"path": f"{i}.py", "text": text, "num_tokens": 9} for i, text in enumerate(PROMPTS)]
    (tmp_path / "prompts.json").write_text(json.dumps(entries))
    monkeypatch.setattr(assets, "files", lambda package: tmp_path)
    return pair


@pytest.fixture
def embedded_heads(embedded, tmp_path) -> Pair:
    """The package's assets are the tiny pair and its heads."""
    for method, path in embedded.heads.items():
        (tmp_path / method).symlink_to(path)
    return embedded


@pytest.fixture
def no_assets(monkeypatch, tmp_path) -> None:
    """The package came without its assets."""
    monkeypatch.setattr(assets, "files", lambda package: tmp_path)
