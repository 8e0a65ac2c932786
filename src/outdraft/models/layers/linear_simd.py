# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""What numba cannot say for the linear kernels: vectors that stay in registers, and atomics.

Addresses count bytes. Wider vectors than the machine has are split by LLVM, so nothing here asks
which machine it is.

NOTE: numba's cache looks at linear_kernels.py only: after a change here, touch that file too.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE = 32  # outputs that are computed together
MAX_PRODUCT_ROWS = 8  # of one product: more sums would not fit the registers

_AHEAD = 4096  # bytes; hardware alone does not look beyond a page, which costs a fifth of the speed
_WIDTH = 16
_HALVES = range(TILE // _WIDTH)
_BYTE, _INT, _LONG, _FLOAT = ir.IntType(8), ir.IntType(32), ir.IntType(64), ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, _WIDTH), ir.VectorType(_INT, _WIDTH)


def _pointer(builder, address, kind, offset=0):
    return builder.inttoptr(builder.add(address, _LONG(offset)), kind.as_pointer())


def _spread(builder, number):
    """A vector of one number."""
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    everywhere = ir.Constant(_INTS, [0] * _WIDTH)
    first = builder.insert_element(undefined, number, _INT(0))
    return builder.shuffle_vector(first, undefined, everywhere)


def _fused(builder, a, b, c):
    """a * b + c, rounded once where the machine can."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.fmuladd.v16f32")
    return builder.call(function, [a, b, c])


def _prefetch(builder, address, offset):
    kind = ir.FunctionType(ir.VoidType(), [_BYTE.as_pointer(), _INT, _INT, _INT])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    to_read, to_nearest, is_data = _INT(0), _INT(3), _INT(1)
    pointer = _pointer(builder, address, _BYTE, offset)
    builder.call(function, [pointer, to_read, to_nearest, is_data])


def _load_weights(builder, address):
    """The weights of two inputs, for TILE outputs each: vectors of the first, of the second."""
    shift, mask = (ir.Constant(_INTS, [number] * _WIDTH) for number in (16, 0xFFFF0000))
    firsts, seconds = [], []
    for half in _HALVES:
        offset = 4 * _WIDTH * half
        _prefetch(builder, address, _AHEAD + offset)
        words = builder.load(_pointer(builder, address, _INTS, offset), align=4)
        firsts.append(builder.bitcast(builder.shl(words, shift), _FLOATS))
        seconds.append(builder.bitcast(builder.and_(words, mask), _FLOATS))
    return firsts, seconds


def _product(num_rows):
    """out[r, e] += sum over k of x[r, k] * w[k, e], for num_rows rows and TILE outputs.

    w is a tile of linear_bf16.pack_tiles, x and out are float32. A sum runs in the order of k
    whatever num_rows is, so that a row's result does not depend on the rows beside it.
    """

    @intrinsic
    def product(typingctx, weights, x, x_row_bytes, num_pairs, out):
        def codegen(context, builder, signature, args):
            weights, x, x_row_bytes, num_pairs, out = args
            zero = ir.Constant(_FLOATS, [0.0] * _WIDTH)
            rows = [builder.add(x, builder.mul(x_row_bytes, _LONG(r))) for r in range(num_rows)]
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in _HALVES] for _ in rows]
            with cgutils.for_range(builder, num_pairs) as loop:
                offset = builder.mul(loop.index, _LONG(4 * TILE))
                pair = _load_weights(builder, builder.add(weights, offset))
                for k, weights_k in enumerate(pair):
                    x_offset = builder.add(builder.mul(loop.index, _LONG(8)), _LONG(4 * k))
                    for row, totals in zip(rows, sums, strict=True):
                        x_at = _pointer(builder, builder.add(row, x_offset), _FLOAT)
                        x_rk = _spread(builder, builder.load(x_at, align=4))
                        for w_k, total in zip(weights_k, totals, strict=True):
                            builder.store(_fused(builder, x_rk, w_k, builder.load(total)), total)
            for r, totals in enumerate(sums):
                for half, total in enumerate(totals):
                    at = _pointer(builder, out, _FLOATS, 4 * (r * TILE + half * _WIDTH))
                    so_far = builder.load(at, align=4)
                    builder.store(builder.fadd(so_far, builder.load(total)), at, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return product


product_1, product_3, product_5, product_8 = (_product(n) for n in (1, 3, 5, 8))


@intrinsic
def pointer(typingctx, address):
    """An address as a pointer that `carray` takes."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen
