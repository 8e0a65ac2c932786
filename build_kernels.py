"""Compile csrc/ into one shared library for each instruction set: `python build_kernels.py`.

The libraries have the same symbols. Python opens the one for the processor it runs on. A library
that is newer than all sources is left as it is. Only the standard library is imported here: the
build of a wheel runs it too (hatch_build.py).
"""

import argparse
import concurrent.futures
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent
SOURCES = ROOT / "csrc"
LIBRARIES = ROOT / "src" / "outdraft" / "kernels" / "native" / "lib"

# By architecture: the name of an instruction set, and what the compiler may use of it. The first
# one has nothing that an old processor lacks; it only says which of the others runs.
FLAGS = {
    "x86_64": {
        "cpu": ["-march=x86-64"],
        "x86-64-v3": ["-march=x86-64-v3"],
        "x86-64-v4": ["-march=x86-64-v4"],
        "x86-64-v4-bf16": ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vnni"],
    },
    "aarch64": {
        "cpu": ["-march=armv8-a"],
        "aarch64": ["-march=armv8.2-a+dotprod"],
        "aarch64-bf16": ["-march=armv8.2-a+dotprod+bf16"],
    },
}
# No -ffast-math and no fused products but where they are written: every sum has its order.
COMMON = [
    *("-std=c++20", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-exceptions"),
    *(
        "-fno-rtti",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-psabi",
    ),
]
SELECTOR = "cpu"
_OLD_GLIBC = "2.17"


def architecture() -> str | None:
    """A key of FLAGS; None: nothing is built for this machine."""
    name = {"amd64": "x86_64", "arm64": "aarch64"}.get(
        platform.machine().lower(), platform.machine()
    )
    return name if name in FLAGS and os.name == "posix" else None


def find_compiler() -> list[str] | None:
    """The command of a C++20 compiler, zig's if there is no other; None: there is none at all."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)) and _compiles([path]):
            return [path]
    zig = [sys.executable, "-m", "ziglang", "c++"]
    if sys.platform == "linux":
        zig += ["-target", f"{platform.machine()}-linux-gnu.{_OLD_GLIBC}"]
    return zig if _compiles(zig) else None


def build(folder: Path, compiler: list[str] | None = None, *, force: bool = False) -> list[Path]:
    """Compile what is missing or older than a source.

    Raises:
        SystemExit: no compiler, or an error of the compiler, which it has printed.
    """
    arch = architecture()
    if arch is None:
        return []
    targets = {folder / f"outdraft-{name}.so": flags for name, flags in FLAGS[arch].items()}
    newest = max(path.stat().st_mtime for path in [*SOURCES.iterdir(), Path(__file__)])
    stale = [
        path for path in targets if force or not path.exists() or path.stat().st_mtime < newest
    ]
    if stale:
        compiler = compiler or find_compiler()
        if compiler is None:
            raise SystemExit("no C++20 compiler: install g++ or clang++, or the package ziglang")
        folder.mkdir(parents=True, exist_ok=True)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(lambda path: _compile(compiler, targets[path], path), stale))
    return list(targets)


def _compile(compiler: list[str], flags: list[str], library: Path) -> None:
    is_selector = library.stem == f"outdraft-{SELECTOR}"
    selector = SOURCES / "cpu_features.cpp"
    sources = [selector] if is_selector else sorted({*SOURCES.glob("*.cpp")} - {selector})
    # Another process may have the old file open: it is replaced, never written into.
    with tempfile.TemporaryDirectory(dir=library.parent) as folder:
        out = Path(folder) / library.name
        done = subprocess.run(
            [*compiler, *COMMON, *flags, "-o", out, *sources, *_libraries(compiler)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{library.name} does not compile:\n{done.stderr}")
        os.replace(out, library)


def _libraries(compiler: list[str]) -> list[str]:
    is_zig = "ziglang" in compiler
    return (
        ["-pthread"]
        if is_zig or sys.platform == "darwin"
        else ["-pthread", "-static-libstdc++", "-static-libgcc"]
    )


def _compiles(compiler: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "probe.cpp"
        source.write_text("#include <bit>\nint f(float x) { return std::bit_cast<int>(x); }\n")
        command = [*compiler, "-std=c++20", "-c", str(source), "-o", str(Path(folder) / "probe.o")]
        try:
            return subprocess.run(command, capture_output=True).returncode == 0
        except OSError:
            return False


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile csrc/ for every instruction set.")
    parser.add_argument("--force", action="store_true", help="also what is newer than its sources")
    for built in build(LIBRARIES, force=parser.parse_args().force):
        print(built.relative_to(ROOT))
