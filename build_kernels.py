"""Compile csrc/ into one shared library for each instruction set: `python build_kernels.py`.

The libraries have the same symbols. Python opens the one for the processor it runs on. Each carries
a digest of the sources and flags that it was made from: one that carries another digest is made
anew, of it only the sources that changed. Only the standard library is imported here: the build of
a wheel runs it too (hatch_build.py).
"""

import argparse
import concurrent.futures
import contextlib
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent
SOURCES = ROOT / "csrc"
LIBRARIES = ROOT / "src" / "outdraft" / "kernels" / "native" / "lib"
CACHE = ROOT / "build" / "kernels"  # object files


@dataclass(frozen=True)
class Target:
    """An instruction set, in the words of gcc and clang, and in those of zig."""

    flags: tuple[str, ...]
    zig_cpu: str


# By architecture. The first one has nothing that an old processor lacks; its library only says
# which of the others runs.
SELECTOR = "cpu"
TARGETS = {
    "x86_64": {
        SELECTOR: Target(("-march=x86-64",), "x86_64"),
        "x86-64-v3": Target(("-march=x86-64-v3",), "x86_64_v3"),
        "x86-64-v3-vnni": Target(("-march=x86-64-v3", "-mavxvnni"), "x86_64_v3+avxvnni"),
        "x86-64-v4": Target(("-march=x86-64-v4",), "x86_64_v4"),
        "x86-64-v4-vnni": Target(("-march=x86-64-v4", "-mavx512vnni"), "x86_64_v4+avx512vnni"),
        "x86-64-v4-bf16": Target(
            ("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"), "x86_64_v4+avx512bf16+avx512vnni"
        ),
        "x86-64-v4-amx": Target(
            (
                *("-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"),
                *("-mavx512vbmi", "-mamx-tile", "-mamx-bf16"),
            ),
            "x86_64_v4+avx512bf16+avx512vnni+avx512vbmi+amx_tile+amx_bf16",
        ),
    },
    "aarch64": {
        SELECTOR: Target(("-march=armv8-a",), "generic"),
        "aarch64": Target(("-march=armv8.2-a+dotprod",), "generic+v8_2a+dotprod"),
        "aarch64-bf16": Target(("-march=armv8.2-a+dotprod+bf16",), "generic+v8_2a+dotprod+bf16"),
    },
}
# No -ffast-math and no fused products but where they are written: every sum has its order.
COMMON = (
    *("-std=c++20", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden", "-fno-exceptions"),
    *("-fno-rtti", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Wno-psabi"),
)
OLDEST_GLIBC, OLDEST_MACOS = (2, 17), (11, 0)  # of what zig compiles, and of what a Mac does


def architecture() -> str | None:
    """A key of TARGETS; None: nothing is built for this machine."""
    machine = platform.machine().lower()
    name = {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)
    return name if name in TARGETS and sys.platform in ("linux", "darwin") else None


def installed_compiler() -> list[str] | None:
    """The command of a compiler outside of Python that does what is needed; None: there is none.

    CXX names one, as for other builds; `CXX=zig` means the one of the package ziglang.

    Raises:
        SystemExit: CXX names one that does not compile this.
    """
    if named := shlex.split(os.environ.get("CXX", "")):
        if named == ["zig"]:
            return None
        if not _does(named):
            raise SystemExit(f"CXX={os.environ['CXX']} makes no libraries from C++20")
        return named
    found = (shutil.which(name) for name in ("c++", "g++", "clang++"))
    return next(([path] for path in found if path and _does([path])), None)


def zig_compiler() -> list[str]:
    """The command of the compiler in the package ziglang."""
    command = [sys.executable, "-m", "ziglang", "c++"]
    if sys.platform == "linux":  # else it compiles for this machine's own glibc
        version = ".".join(map(str, OLDEST_GLIBC))
        command += ["-target", f"{architecture()}-linux-gnu.{version}"]
    return command


def is_zig(compiler: Sequence[str]) -> bool:
    return "ziglang" in compiler


def build(
    folder: Path,
    compiler: Sequence[str] | None = None,
    *,
    only: Collection[str] = (),
    force: bool = False,
    flags: Sequence[str] = (),
) -> list[Path]:
    """Make the libraries that are missing or stale; all of them are returned.

    Args:
        compiler: None: an installed one, else that of ziglang.
        only: instruction sets; all if empty. The library that selects one is always made.
        force: also what is not stale.
        flags: more of them, that change no code.

    Raises:
        SystemExit: no compiler, or an error of the compiler.
    """
    targets = TARGETS.get(architecture() or "", {})
    if unknown := {*only} - targets.keys():
        raise SystemExit(f"this machine has no {', '.join(sorted(unknown))}: {', '.join(targets)}")
    targets = {
        name: target for name, target in targets.items() if not only or name in {*only, SELECTOR}
    }
    paths = {name: folder / f"outdraft-{name}.so" for name in targets}
    stale = [name for name in targets if force or is_stale(paths[name], name)]
    if stale:
        compiler = compiler or installed_compiler() or zig_compiler()
        if not _does(compiler):
            raise SystemExit("no C++20 compiler: install g++ or clang++, or the package ziglang")
        folder.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            linkers = [_library(paths[name], name, [*compiler], [*flags], pool) for name in stale]
            for link in linkers:
                link()
    return list(paths.values())


def of_this_machine(folder: Path, compiler: Sequence[str] | None = None) -> list[str]:
    """The least and the best instruction set of this machine, which tests compare, and those that
    were built before."""
    selector = build(folder, compiler, only=[SELECTOR])[0]
    bits = ctypes.CDLL(str(selector)).usable_instruction_sets()
    names = [name for name in TARGETS.get(architecture() or "", {}) if name != SELECTOR]
    usable = [name for place, name in enumerate(names) if bits >> place & 1]
    built = [name for name in names if (folder / f"outdraft-{name}.so").exists()]
    return [*usable[:1], *usable[-1:], *built]


def is_stale(library: Path, name: str) -> bool:
    """Whether it is missing, or made from other sources or with other flags."""
    return not library.exists() or source_digest(name).encode() not in library.read_bytes()


def source_digest(name: str) -> str:
    """Of all that the library of an instruction set is made from; it carries it.

    The name of the compiler is not part of it.
    """
    target = TARGETS[architecture() or ""][name]
    texts = [(path.name.encode(), path.read_bytes()) for path in [*_sources(name), *_headers()]]
    return hashlib.sha256(repr((COMMON, target, texts)).encode()).hexdigest()


def _sources(name: str) -> list[Path]:
    selector, digest = SOURCES / "cpu_features.cpp", SOURCES / "digest.cpp"
    return [selector, digest] if name == SELECTOR else sorted({*SOURCES.glob("*.cpp")} - {selector})


def _headers() -> list[Path]:
    return sorted(SOURCES.glob("*.h"))


def _library(
    library: Path,
    name: str,
    compiler: list[str],
    more_flags: list[str],
    pool: concurrent.futures.Executor,
) -> Callable[[], None]:
    """Start to compile the objects of a library; the call returned waits for them and links."""
    target = TARGETS[architecture() or ""][name]
    flags = [f"-mcpu={target.zig_cpu}"] if is_zig(compiler) else [*target.flags]
    digest = f'-DOUTDRAFT_DIGEST="{source_digest(name)}"'
    headers = [path.read_bytes() for path in _headers()]
    # Others may compile at the same time: who links forgets the old objects of its compiler only.
    cache = CACHE / Path(compiler[0]).name / name
    cache.mkdir(parents=True, exist_ok=True)
    objects: list[concurrent.futures.Future[Path]] = []
    for source in _sources(name):
        own = [digest] if source.name == "digest.cpp" else []
        command = [*compiler, *COMMON, *flags, *own, "-c", str(source)]
        made_from = repr((command, source.read_bytes(), headers)).encode()
        key = hashlib.sha256(made_from).hexdigest()[:16]
        path = cache / f"{source.stem}-{key}.o"
        objects.append(pool.submit(_object, path, [*command, *more_flags]))

    def link() -> None:
        paths = [one.result() for one in objects]
        # The parts of zig's C++ library are the same in all: they are compiled once.
        base = TARGETS[architecture() or ""][SELECTOR].zig_cpu
        cpu = [f"-mcpu={base}"] if is_zig(compiler) else []
        _make(library, [*compiler, *cpu, *map(str, paths), *_link_flags(compiler)])
        for old in {*cache.glob("*.o")} - {*paths}:
            old.unlink(missing_ok=True)

    return link


def _object(path: Path, command: list[str]) -> Path:
    if not path.exists():
        _make(path, command)
    return path


def _make(path: Path, command: list[str]) -> None:
    """Run the command, which writes the file; it appears when it is whole."""
    # Another process may have the old file open: it is replaced, never written into.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        out = Path(folder) / path.name
        done = _run([*command, "-o", str(out)])
        if done.returncode:
            raise SystemExit(f"{path.name} is not made:\n{done.stderr}")
        os.replace(out, path)


def _link_flags(compiler: Sequence[str]) -> list[str]:
    flags = ["-shared", "-pthread"]
    if sys.platform == "darwin":
        return [*flags, "-mmacosx-version-min=" + ".".join(map(str, OLDEST_MACOS))]
    flags += ["-s", "-Wl,-z,defs"]
    return flags if is_zig(compiler) else [*flags, "-static-libstdc++", "-static-libgcc"]


def _does(compiler: Sequence[str]) -> bool:
    """Whether it knows the language and all flags."""
    target = [*TARGETS[architecture() or ""].values()][-1]
    cpu = [f"-mcpu={target.zig_cpu}"] if is_zig(compiler) else [*target.flags]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <bit>\nint f(float x) { return std::bit_cast<int>(x); }\n")
        command = [*compiler, *COMMON, *cpu, str(source), "-o", str(Path(folder) / "probe.o")]
        # zig compiles its C++ library before it links the first time, which takes a minute.
        link = ["-c"] if is_zig(compiler) else _link_flags(compiler)
        try:
            return _run([*command, *link]).returncode == 0
        except OSError:
            return False


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    caches = {f"ZIG_{name}_CACHE_DIR": str(CACHE / "zig") for name in ("GLOBAL", "LOCAL")}
    return subprocess.run(command, capture_output=True, text=True, env=caches | {**os.environ})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile csrc/ for every instruction set.")
    parser.add_argument("--folder", type=Path, default=LIBRARIES, help="where libraries are put")
    parser.add_argument("--only", action="append", default=[], help="an instruction set")
    parser.add_argument(
        "--here", action="store_true", help="the least and the best of this machine"
    )
    parser.add_argument("--force", action="store_true", help="also what is not stale")
    given = parser.parse_args()
    # A warning stops whoever changes the sources, not whoever installs them.
    only = given.only + (of_this_machine(given.folder) if given.here else [])
    made = build(given.folder, only=only, force=given.force, flags=["-Werror"])
    for built in made:
        with contextlib.suppress(ValueError):
            built = built.relative_to(ROOT)
        print(built)
