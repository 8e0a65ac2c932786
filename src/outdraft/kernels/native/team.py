"""The threads of the compiled library that share work of microseconds, see csrc/team.h."""

import functools
import weakref
from ctypes import c_int64, c_void_p

from outdraft.kernels.native.library import Library, open_library


class Team:
    """The calling thread and its helpers, which end with this object.

    Attributes:
        address: for the functions of the library.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library, self.num_threads = library, num_threads
        create = library.function("team_create", [c_int64], c_void_p)
        destroy = library.function("team_destroy", [c_void_p], releases_gil=True)
        self.address: int = create(num_threads)
        end = weakref.finalize(self, destroy, self.address)
        end.atexit = False  # the process ends them


@functools.cache
def shared_team(library_name: str, num_threads: int) -> Team:
    """That of this process, for a library."""
    library = open_library(library_name)
    assert library is not None
    return Team(library, num_threads)
