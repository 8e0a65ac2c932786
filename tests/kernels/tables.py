"""Tables of kernels for tests."""

from outdraft.kernels.native.library import open_library
from outdraft.kernels.native.table import native_kernels
from outdraft.kernels.ops import Kernels


def cpu_kernels(num_threads: int = 1) -> Kernels:
    """Of the fastest library."""
    library = open_library()
    assert library is not None, "run `make lib` first"
    return native_kernels(library, num_threads)
