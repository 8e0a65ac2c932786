"""Where compiled kernels are kept, by which key, and what is said while they compile."""

import io
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outdraft.core import jit
from tests.models.checkpoints import llama, randomised, save


def package(root: Path, **changes: str) -> Path:
    """Sources of a small package, by the name of the file."""
    sources = {
        "kernel": "from outdraft.core.jit import njit\nfrom outdraft.limits import MOST\n",
        "callee": "from numba.extending import intrinsic\n",
        "limits": "MOST = 3\n",
        "other": "# nothing that compiles\n",
    }
    folder = root / "outdraft"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (sources | changes).items():
        (folder / f"{name}.py").write_text(text)
    return folder


@pytest.mark.parametrize("name", ["kernel", "callee", "limits"])
def test_a_change_of_any_kernel_source_changes_the_key(name: str, tmp_path: Path):
    folder = package(tmp_path)
    key = jit.source_key(folder)
    with (folder / f"{name}.py").open("a") as file:
        file.write("# changed\n")
    assert jit.source_key(folder) != key


def test_the_same_sources_elsewhere_have_the_same_key(tmp_path: Path):
    key = jit.source_key(package(tmp_path / "here"))
    assert jit.source_key(package(tmp_path / "there", other="# no kernel changed\n")) == key


def test_every_file_that_compiles_is_in_the_key():
    named = {path.name for path in jit.kernel_sources(jit.SOURCES)}
    for path in jit.SOURCES.rglob("*.py"):
        if "@njit" in path.read_text() or "@intrinsic" in path.read_text():
            assert path.name in named
    assert "draft.py" in named  # a constant that kernels are compiled with


def test_a_place_that_cannot_be_written_is_replaced_by_a_private_temporary_one(tmp_path: Path):
    (tmp_path / "file").write_text("")
    own, temporary = tmp_path / "own", tmp_path / "temporary"

    assert jit.chosen_folder("kernels-1", own, temporary) == own / "kernels-1"
    chosen = jit.chosen_folder("kernels-1", tmp_path / "file" / "below", temporary)

    assert chosen is not None
    assert chosen.is_relative_to(temporary)
    assert chosen.parent.stat().st_mode & 0o077 == 0
    chosen.parent.chmod(0o777)  # others could put code there
    assert jit.chosen_folder("kernels-1", tmp_path / "file" / "below", temporary) is None


def test_folders_of_other_sources_go_when_nobody_used_them_for_a_month(tmp_path: Path):
    for days in (1, 40):
        folder = tmp_path / f"kernels-{days}"
        folder.mkdir()
        then_s = time.time() - days * 24 * 3600
        os.utime(folder, (then_s, then_s))

    jit.chosen_folder("kernels-new", tmp_path, tmp_path)

    assert {path.name for path in tmp_path.iterdir()} == {"kernels-1", "kernels-new"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Dispatcher:
    """What numba's event carries, of a function."""

    def __init__(self, module: str) -> None:
        self.py_func = lambda: None
        self.py_func.__name__, self.py_func.__module__ = "walk", module


class Compilation:
    def __init__(self, module: str) -> None:
        self.data = {"dispatcher": Dispatcher(module)}


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal(), None])
def test_kernels_that_compile_are_said_and_timed_those_of_others_are_not(stream):
    announcement = jit.Announcement(stream)
    other, outer, inner = (Compilation(f"{name}.module") for name in ("other", *["outdraft"] * 2))

    announcement.on_start(other)
    announcement.on_end(other)
    assert announcement.seconds == 0
    assert stream is None or stream.getvalue() == ""

    announcement.on_start(outer)
    announcement.on_start(inner)
    announcement.on_end(inner)
    announcement.on_end(outer)

    assert announcement.seconds > 0
    if stream is not None:
        said = stream.getvalue()
        assert said.count("compiling kernels, once") == 1
        assert said.endswith("\r\x1b[K" if stream.isatty() else "now walk\n")


def test_a_clock_stands_while_a_kernel_compiles():
    def walk(number: int) -> int:
        return number + 1

    walk.__module__ = "outdraft.walk"
    kernel = jit.njit(walk)
    compiled_s, worked_s, now_s = jit.compile_seconds(), jit.working_seconds(), time.monotonic()

    assert kernel(1) == 2

    assert jit.compile_seconds() > compiled_s
    assert jit.working_seconds() - worked_s < time.monotonic() - now_s


PROGRAM = """
import sys
from outdraft.core.jit import cache_folder
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
llm = LLM(sys.argv[1], device="cpu", num_blocks=16)
params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
print(llm.generate([[3, 4, 5]], params)[0].outputs[0].token_ids)
print(cache_folder())
"""


def answer(path: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(path)], env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


def test_without_a_place_for_a_cache_an_engine_starts_and_a_warm_one_is_silent(tmp_path: Path):
    model = save(randomised(llama()), tmp_path / "model")
    (tmp_path / "file").write_text("")
    nowhere = str(tmp_path / "file" / "below")
    environ = {**os.environ, "HOME": nowhere, "XDG_CACHE_HOME": nowhere, "TMPDIR": str(tmp_path)}
    environ.pop("NUMBA_CACHE_DIR", None)
    shared = jit.cache_folder()
    assert shared is not None
    private = tmp_path / f"outdraft-{os.getuid()}"
    private.mkdir(mode=0o700)
    (private / shared.name).symlink_to(shared)  # what is compiled already need not be again

    first = answer(model, environ)
    second = answer(model, environ)

    assert first.stdout == second.stdout
    assert first.stdout.splitlines()[1] == str(private / shared.name)
    assert "compiling" not in second.stderr


def test_a_users_own_cache_of_numba_is_used(tmp_path: Path):
    program = "from outdraft.core.jit import cache_folder; print(cache_folder())"
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).parent == tmp_path


def test_a_stream_that_nobody_reads_fails_no_kernel():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    announcement = jit.Announcement(Closed())
    announcement._say("kernel")
    announcement._say("another")
    assert announcement._stream is None
