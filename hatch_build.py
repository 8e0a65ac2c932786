"""The build of a wheel compiles csrc/ into it; an editable install gets this machine's libraries.

Where no C++20 compiler is installed, the package ziglang brings one. On machines that
build_kernels.py has no instruction sets for, the wheel holds Python only: the readable reference
runs there.
"""

import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))  # pip runs this file from anywhere

import build_kernels as kernels


class KernelsHook(BuildHookInterface[Any]):
    """Named in pyproject.toml."""

    def dependencies(self) -> list[str]:
        """What the build needs besides hatchling."""
        if kernels.architecture() is None or kernels.installed_compiler() is not None:
            return []
        return ["ziglang>=0.17"]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and name the platform in the wheel's tag."""
        architecture = kernels.architecture()
        if architecture is None:
            self.app.display_warning("no kernels are compiled for this machine: the reference runs")
            return
        compiler = kernels.installed_compiler() or kernels.zig_compiler()
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(architecture, kernels.is_zig(compiler))}"
        if version == "editable":
            here = kernels.of_this_machine(kernels.LIBRARIES, compiler)
            kernels.build(kernels.LIBRARIES, compiler, only=here)
            return
        # Another compiler may have made the libraries of an editable install.
        folder = kernels.CACHE / "wheel"
        for library in kernels.build(folder, compiler, force=True):
            inside = kernels.LIBRARIES.relative_to(kernels.ROOT / "src") / library.name
            build_data["force_include"][str(library)] = str(inside)


def platform_tag(architecture: str, is_zig: bool) -> str:
    """As in the names of wheels."""
    if sys.platform == "darwin":
        name = {"aarch64": "arm64"}.get(architecture, architecture)
        return "_".join(["macosx", *map(str, kernels.OLDEST_MACOS), name])
    if not is_zig:
        return f"linux_{architecture}"  # made for the C library of this machine
    return "_".join(["manylinux", *map(str, kernels.OLDEST_GLIBC), architecture])
