# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN202
# numba infers the types of these functions and specialises on them.
"""Arrays without owners: found by their address, as many as a batch needs, or not counted.

NOTE: the code that hands out an address must keep the array alive while a kernel may use it.
"""

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from outdraft.core.jit import njit

_INT32 = np.dtype(np.int32)  # to compare with this is cheap, with np.int32 it is not


@intrinsic
def _pointer(typing_context, address):
    """An address as a pointer that `carray` takes."""

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(types.int64), generate


def place_of_array(array: np.ndarray) -> tuple[int, int, int]:
    """Address, length and width of a C-contiguous int32 array of two dimensions."""
    assert array.dtype == np.int32
    assert array.flags.c_contiguous
    return array.ctypes.data, *array.shape


def address_of(token_ids: np.ndarray) -> int:
    """Where contiguous int32 token ids, [T], begin."""
    assert token_ids.dtype == _INT32
    return _address(token_ids)


@njit(cache=True)
def _address(array: np.ndarray) -> int:
    """Every request is asked for this in every step: numpy's own answer takes ten times as long."""
    assert len(array) < 2 or array.strides[0] == array.itemsize
    return array.ctypes.data


@njit(cache=True)
def array_at(place_3: np.ndarray) -> np.ndarray:
    """The array at a place, int64 [3], as `place_of_array` names it."""
    return carray(_pointer(place_3[0]), (place_3[1], place_3[2]))


@njit(cache=True)
def text_at(address: int, num_tokens: int) -> np.ndarray:
    """The token ids that begin at an address."""
    return carray(_pointer(address), num_tokens)


@intrinsic
def _uncounted(typing_context, array):
    """An array that has no owner to count references for."""

    def generate(context, builder, signature, arguments):
        view = context.make_array(signature.return_type)(context, builder, arguments[0])
        view.meminfo = view.meminfo.type(None)
        return view._getvalue()

    return array(array), generate


@njit(cache=True)
def uncounted(array: np.ndarray) -> np.ndarray:
    """An argument of a kernel, which its caller keeps alive, without a count of references.

    Counting is atomic: handing an array on to small functions costs more than what they do.
    """
    return _uncounted(array)
