"""How libraries are built, packed into wheels, found and opened."""

import ctypes
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

import build_kernels
from hatch_build import KernelsHook, platform_tag
from outdraft.attention.rows import Span
from outdraft.core.errors import ConfigError
from outdraft.kernels.native.library import (
    INSTRUCTION_SETS,
    Library,
    open_library,
    usable_instruction_sets,
)
from outdraft.kernels.native.step import NativeRows
from outdraft.kernels.torch.rows import place_rows
from tests.pairwise import some

ARCHITECTURE = build_kernels.architecture()
NAMES = list(build_kernels.TARGETS.get(ARCHITECTURE or "", ()))
EVERY = [(machine, name) for machine, targets in build_kernels.TARGETS.items() for name in targets]
pytestmark = pytest.mark.skipif(ARCHITECTURE is None, reason="no library for this machine")


def assert_computes(library: Library) -> None:
    """It lays out the rows of one step as the reference does."""
    spans = [Span(5, 1, (0, 1, 1), (4, 2, 7)), Span(0, 3, (), (1,), 20, samples=False)]
    step = (spans, [[8]], 4, 3)
    got, want = NativeRows(library).place_rows(*step), place_rows(*step)
    for name in ("query_start_B1", "ancestors_T", "positions_T", "state_index_T"):
        assert torch.equal(getattr(got, name), getattr(want, name))


def digest_of(path: Path) -> str:
    """That of the sources, by the library's own word."""
    function = ctypes.CDLL(str(path)).source_digest
    function.restype = ctypes.c_char_p
    return function().decode()


def other_digest(digest: str) -> str:
    return digest[:-1] + ("0" if digest[-1] != "0" else "1")


def run(*command: str, **environ: str) -> None:
    done = subprocess.run(
        command, cwd=build_kernels.ROOT, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", some(NAMES, {NAMES[0], *usable_instruction_sets()[-1:]}))
def test_libraries_are_made_from_the_sources_beside_them(name):
    path = build_kernels.LIBRARIES / f"outdraft-{name}.so"
    assert digest_of(path) == build_kernels.source_digest(name), "run `make lib` first"


def test_there_is_a_target_for_each_instruction_set():
    assert INSTRUCTION_SETS.keys() == build_kernels.TARGETS.keys()
    for architecture, targets in build_kernels.TARGETS.items():
        assert [build_kernels.SELECTOR, *INSTRUCTION_SETS[architecture]] == list(targets)


def test_a_library_is_stale_as_soon_as_one_byte_of_it_is_from_other_sources(tmp_path):
    library = tmp_path / "outdraft-cpu.so"
    assert build_kernels.is_stale(library, "cpu")
    digest = build_kernels.source_digest("cpu")
    library.write_bytes(f"before{digest}behind".encode())
    assert not build_kernels.is_stale(library, "cpu")
    library.write_bytes(f"before{other_digest(digest)}behind".encode())
    assert build_kernels.is_stale(library, "cpu")


@pytest.mark.parametrize("name", usable_instruction_sets())
@pytest.mark.parametrize("missing", ["interface", "place_rows, copy", "num_sampling"])
def test_a_library_of_another_version_is_refused(tmp_path, name, missing):
    """It describes nothing, or lacks a function or a field of a struct."""
    made = (build_kernels.LIBRARIES / f"outdraft-{name}.so").read_bytes()
    assert missing.encode() in made
    other = made.replace(missing.encode(), missing.replace("n", "m").replace("e", "c").encode())
    (tmp_path / f"outdraft-{name}.so").write_bytes(other)
    with pytest.raises(ConfigError, match=r"belongs to another version of the code.*`make lib`"):
        assert_computes(Library(name, tmp_path))


def test_structs_have_the_layout_of_the_compiler():
    library = open_library()
    assert library is not None
    counts = library.struct("RowCounts", num_works=1, width=7)
    with pytest.raises(ConfigError, match="without Counts:"):
        library.struct("Counts")
    assert bytes(counts) == (1).to_bytes(8, "little") + bytes(48) + (7).to_bytes(8, "little")


def test_arguments_of_other_types_are_refused():
    library = open_library()
    assert library is not None
    place, three = library.function("requests_of_rows"), torch.tensor([3])
    place(1, three, 4, requests_R := torch.empty(4, dtype=torch.int64))
    assert requests_R.tolist() == [0] * 4
    with pytest.raises(ctypes.ArgumentError, match=r"expected torch.int64, got torch.float32"):
        place(1, three.float(), 4, requests_R)
    with pytest.raises(ctypes.ArgumentError, match="lie apart"):
        place(1, three, 4, torch.empty(4, 2, dtype=torch.int64)[:, 0])


@pytest.mark.full  # `make test` does not build all libraries
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_linux_says_that_it_has_what_the_chosen_library_needs():
    flags = set(re.findall(r"\w+", Path("/proc/cpuinfo").read_text()))
    v3 = {"avx2", "fma", "bmi1", "bmi2", "f16c"}
    v4 = v3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
    bf16 = v4 | {"avx512_vnni", "avx512_bf16"}
    needed = {
        "x86-64-v3": v3,
        "x86-64-v3-vnni": v3 | {"avx_vnni"},
        "x86-64-v4": v4,
        "x86-64-v4-vnni": v4 | {"avx512_vnni"},
        "x86-64-v4-bf16": bf16,
        "x86-64-v4-amx": bf16 | {"avx512vbmi", "amx_tile", "amx_bf16"},
        "aarch64": {"asimddp", "atomics"},
        "aarch64-bf16": {"asimddp", "atomics", "bf16"},
    }
    names = INSTRUCTION_SETS[ARCHITECTURE or ""]
    has = [name for name in names if needed[name] <= flags]
    assert list(usable_instruction_sets()) == has


@pytest.mark.parametrize("name", usable_instruction_sets())
def test_each_library_that_this_processor_runs_can_be_asked_for(name):
    library = open_library(name)
    assert library is not None
    assert library.name == name
    assert_computes(library)


def test_an_unknown_library_is_refused_by_name():
    with pytest.raises(ConfigError, match="'x86-64-v9'"):
        open_library("x86-64-v9")


def test_compilers_leave_each_others_objects_alone(tmp_path, monkeypatch):
    compiler = build_kernels.installed_compiler()
    if compiler is None:
        pytest.skip("needs a compiler")
    monkeypatch.setattr(build_kernels, "CACHE", tmp_path / "objects")
    other = tmp_path / "other-c++"
    other.symlink_to(compiler[0])
    made: list[set[Path]] = []
    for command in (compiler, [str(other), *compiler[1:]]):
        build_kernels.build(tmp_path / "lib", command, only=[build_kernels.SELECTOR], force=True)
        made.append(set(tmp_path.rglob("*.o")))
    assert made[0]
    assert made[0] < made[1]


@pytest.mark.parametrize("architecture", [None, "x86_64"])
def test_a_build_asks_for_ziglang_only_where_it_compiles_and_finds_no_compiler(
    architecture, monkeypatch
):
    hook = KernelsHook("", {}, None, None, "", "wheel")
    monkeypatch.setattr(build_kernels, "architecture", lambda: architecture)
    monkeypatch.setattr(build_kernels, "installed_compiler", lambda: ["c++"])
    assert hook.dependencies() == []
    monkeypatch.setattr(build_kernels, "installed_compiler", lambda: None)
    assert hook.dependencies() == ([] if architecture is None else ["ziglang>=0.17"])


@pytest.mark.slow
@pytest.mark.full  # minutes where nothing of zig is compiled yet
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_machine_without_a_compiler_makes_libraries_with_the_one_of_ziglang(name, tmp_path):
    """The one that computes and the selector: zig's C++ library, made in minutes, serves both."""
    build = [sys.executable, "build_kernels.py", "--folder", str(tmp_path), "--only", name]
    run(*build, HOME=str(tmp_path), PATH=str(tmp_path))
    selector = tmp_path / f"outdraft-{build_kernels.SELECTOR}.so"
    assert digest_of(selector) == build_kernels.source_digest(build_kernels.SELECTOR)
    library = tmp_path / f"outdraft-{name}.so"
    if name in usable_instruction_sets():
        assert_computes(Library(name, tmp_path))
    for path in (selector, library):
        versions = [int(one) for one in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
        assert max(versions, default=0) <= build_kernels.OLDEST_GLIBC[1]


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="names targets of Linux")
@pytest.mark.parametrize(
    ("architecture", "name"), [one for one in EVERY if one[1] != build_kernels.SELECTOR]
)
def test_sources_compile_without_a_warning_for_processors_that_run_no_test(
    architecture, name, tmp_path, monkeypatch
):
    monkeypatch.setattr(build_kernels, "architecture", lambda: architecture)
    cpu = f"-mcpu={build_kernels.TARGETS[architecture][name].zig_cpu}"
    command = [*build_kernels.zig_compiler(), *build_kernels.COMMON, "-O0", "-Werror", cpu]
    digest = '-DOUTDRAFT_DIGEST=""'
    out = str(tmp_path / "source.o")
    # As in a build, zig does not compile again what has not changed, headers and flags included.
    folder = str(build_kernels.CACHE / "zig")
    caches = {"ZIG_GLOBAL_CACHE_DIR": folder, "ZIG_LOCAL_CACHE_DIR": folder}
    for source in sorted(build_kernels.SOURCES.glob("*.cpp")):
        run(*command, digest, "-c", str(source), "-o", out, HOME=str(tmp_path), **caches)


@pytest.mark.slow
@pytest.mark.full  # it compiles the libraries that `make test` does not build
def test_a_wheel_holds_libraries_for_its_platform(tmp_path):
    environ = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path), **environ)
    (wheel,) = tmp_path.glob("*.whl")
    tag = platform_tag(ARCHITECTURE or "", build_kernels.installed_compiler() is None)
    assert wheel.name.endswith(f"-py3-none-{tag}.whl")
    with zipfile.ZipFile(wheel) as archive:
        files = {Path(name).name: name for name in archive.namelist()}
        built = {f"outdraft-{name}.so" for name in NAMES}
        assert {name for name in files if name.endswith(".so")} == built
        assert not {name for name in files if name.endswith((".cpp", ".h"))}
        for name in built:
            assert files[name] == f"outdraft/kernels/native/lib/{name}"
            (tmp_path / name).write_bytes(archive.read(files[name]))
    assert_computes(Library(usable_instruction_sets()[-1], tmp_path))


@pytest.mark.skipif(sys.platform != "linux", reason="tags of Linux")
def test_what_zig_makes_runs_on_old_systems_and_other_libraries_on_this_one():
    assert platform_tag("x86_64", is_zig=True) == "manylinux_2_17_x86_64"
    assert platform_tag("aarch64", is_zig=False) == "linux_aarch64"


def test_without_any_compiler_the_build_says_what_to_install(tmp_path):
    folder = tmp_path / "lib"
    with pytest.raises(SystemExit, match="install g\\+\\+ or clang"):
        build_kernels.build(folder, [str(tmp_path / "missing")])
    assert not folder.exists()
