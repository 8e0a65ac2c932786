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
MAX_PRODUCT_ROWS = 8  # more rows would run out of registers

_WIDTH = 16
_FLOAT, _INT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, _WIDTH), ir.VectorType(_INT, _WIDTH)
_AHEAD = 2048


def _pointer(builder, address, kind, offset=0):
    return builder.inttoptr(builder.add(address, _LONG(offset)), kind.as_pointer())


def _spread(builder, number):
    """A vector of one number."""
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    everywhere = ir.Constant(_INTS, [0] * _WIDTH)
    first = builder.insert_element(undefined, number, _INT(0))
    return builder.shuffle_vector(first, undefined, everywhere)


def _product(num_rows):
    """out[r, :TILE] = sum over k of x[r, k] * w[k, :TILE] for num_rows rows, in the order of k.

    The weights of k = 2 p and 2 p + 1 lie in the low and high halves of TILE words at
    w + 4 * TILE * p: a shift and a mask make two vectors of float32 from one of them.
    """

    @intrinsic
    def product(typingctx, weights, x, x_row_bytes, num_pairs, out):
        def codegen(context, builder, signature, args):
            weights, x, x_row_bytes, num_pairs, out = args
            fused = builder.module.declare_intrinsic("llvm.fmuladd", [_FLOATS])
            prefetch = builder.module.declare_intrinsic(
                "llvm.prefetch",
                (),
                ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer(), _INT, _INT, _INT]),
            )
            zero = ir.Constant(_FLOATS, [0.0] * _WIDTH)
            shift, mask = (ir.Constant(_INTS, [n] * _WIDTH) for n in (16, 0xFFFF0000))
            halves = range(TILE // _WIDTH)
            sums = [[cgutils.alloca_once_value(builder, zero) for _ in halves]
                    for _ in range(num_rows)]
            rows = [builder.add(x, builder.mul(x_row_bytes, _LONG(r))) for r in range(num_rows)]
            with cgutils.for_range(builder, num_pairs) as loop:
                w_at = builder.add(weights, builder.mul(loop.index, _LONG(4 * TILE)))
                x_offset = builder.mul(loop.index, _LONG(8))
                lows, highs = [], []
                for half in halves:
                    at = _pointer(builder, w_at, _INTS, 4 * _WIDTH * half)
                    if _AHEAD:
                        builder.call(prefetch, [_pointer(builder, w_at, ir.IntType(8), _AHEAD + 64 * half), _INT(0), _INT(3), _INT(1)])
                    words = builder.load(at, align=4)
                    lows.append(builder.bitcast(builder.shl(words, shift), _FLOATS))
                    highs.append(builder.bitcast(builder.and_(words, mask), _FLOATS))
                for k, factors in enumerate((lows, highs)):
                    for row, totals in zip(rows, sums, strict=True):
                        x_at = _pointer(builder, builder.add(row, x_offset), _FLOAT, 4 * k)
                        x_rk = _spread(builder, builder.load(x_at, align=4))
                        for w_k, total in zip(factors, totals, strict=True):
                            more = builder.call(fused, [x_rk, w_k, builder.load(total)])
                            builder.store(more, total)
            for r, totals in enumerate(sums):
                for half, total in enumerate(totals):
                    at = _pointer(builder, out, _FLOATS, 4 * (r * TILE + half * _WIDTH))
                    builder.store(builder.load(total), at, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), codegen

    return product


product_1, product_2, product_3, product_4 = (_product(n) for n in range(1, 5))
product_5, product_6, product_7, product_8 = (_product(n) for n in range(5, 9))
