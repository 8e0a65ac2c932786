"""Published models by name, and llama.cpp on them.

SmolLM2 alone is fetched unless `--published all` asks for the others, too. A test is skipped where
a model is not asked for, or cannot be had.
"""

import sys
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path

import pytest

from tests.published.llama_cpp import LlamaCpp, write_float32

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "published"))

from fetch import DownloadError, fetch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("published")


@pytest.fixture(scope="session")
def published(request: pytest.FixtureRequest) -> Callable[[str], Path]:
    """The path of a model's file, given its name in benchmarks/published/fetch.py."""
    folder, asked = (request.config.getoption(f"published{end}") for end in ("_folder", ""))

    @cache
    def fetched(name: str) -> Path | str:
        """The path, or why there is none: the index is asked once."""
        try:
            return fetch(name, folder)
        except DownloadError as error:
            return f"{name} cannot be fetched: {error}"

    def path(name: str) -> Path:
        if name != asked and asked != "all":
            pytest.skip(f"{name} needs --published all")
        found = fetched(name)
        return found if isinstance(found, Path) else pytest.skip(found)

    return path


@pytest.fixture(scope="session")
def llama_cpp(published: Callable[[str], Path]) -> Callable[[str], LlamaCpp]:
    """llama.cpp on a model, given its name; one is kept, that of the last name."""
    return lru_cache(maxsize=1)(lambda name: LlamaCpp(published(name)))


@pytest.fixture(scope="session")
def exact_llama_cpp(
    published: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], LlamaCpp]:
    """The same on weights in float32: four bytes a parameter on disk and in memory."""

    @lru_cache(maxsize=1)
    def started(name: str) -> LlamaCpp:
        path = tmp_path_factory.mktemp("float32") / f"{name}.gguf"
        return LlamaCpp(write_float32(published(name), path))

    return started
