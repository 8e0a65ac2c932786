# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""What numba cannot say for the linear kernels: vectors that stay in registers, and atomics.

Addresses count bytes. Wider vectors than the machine has are split by LLVM, so nothing here asks
which machine it is.
"""

import platform

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

TILE = 32  # outputs that are computed together
MAX_PRODUCT_ROWS = 8  # of one product: more sums would not fit the registers

_AHEAD = 4096  # bytes; hardware alone does not look beyond a page, which costs a fifth of the speed
_WIDTH = 16
_HALVES = range(TILE // _WIDTH)
_BYTE, _SHORT, _INT, _LONG = (ir.IntType(bits) for bits in (8, 16, 32, 64))
_FLOAT = ir.FloatType()
_FLOATS, _INTS = ir.VectorType(_FLOAT, _WIDTH), ir.VectorType(_INT, _WIDTH)


def _pointer(builder, address, kind, offset=0):
    return builder.inttoptr(builder.add(address, _LONG(offset)), kind.as_pointer())


def _spread(builder, number):
    """A vector of one number."""
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    everywhere = ir.Constant(_INTS, [0] * _WIDTH)
    first = builder.insert_element(undefined, number, _INT(0))
    return builder.shuffle_vector(first, undefined, everywhere)


def _call(builder, name, result, args):
    kind = ir.FunctionType(result, [arg.type for arg in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def _fused(builder, a, b, c):
    """a * b + c, rounded once where the machine can."""
    return _call(builder, "llvm.fmuladd.v16f32", _FLOATS, [a, b, c])


def _prefetch(builder, address, offset):
    to_read, to_nearest, is_data = _INT(0), _INT(3), _INT(1)
    args = [_pointer(builder, address, _BYTE, offset), to_read, to_nearest, is_data]
    _call(builder, "llvm.prefetch.p0", ir.VoidType(), args)


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


def _for_each(builder, count, body):
    """body(offset, width) over count numbers: vectors, then what is left one by one."""
    whole = builder.mul(builder.udiv(count, _LONG(_WIDTH)), _LONG(_WIDTH))
    for start, stop, width in ((_LONG(0), whole, _WIDTH), (whole, count, 1)):
        with cgutils.for_range_slice(builder, start, stop, _LONG(width)) as (offset, _):
            body(offset, width)


def _kind(element, width):
    return ir.VectorType(element, width)


def _at(builder, address, offset, element, width):
    """Pointer to the element number `offset`, as a vector."""
    size = 2 if element == _SHORT else 4
    byte = builder.add(address, builder.mul(offset, _LONG(size)))
    return builder.inttoptr(byte, _kind(element, width).as_pointer())


def _constant(number, width):
    return ir.Constant(_kind(_INT, width), [number] * width)


def _to_bf16(builder, x, width):
    """To nearest, ties to even, as PyTorch does."""
    bits = builder.bitcast(x, _kind(_INT, width))
    odd = builder.and_(builder.lshr(bits, _constant(16, width)), _constant(1, width))
    rounded = builder.add(builder.add(bits, _constant(0x7FFF, width)), odd)
    upper = builder.lshr(rounded, _constant(16, width))
    is_nan = builder.fcmp_unordered("uno", x, x)
    upper = builder.select(is_nan, _constant(0x7FC0, width), upper)
    return builder.trunc(upper, _kind(_SHORT, width))


@intrinsic
def load_row(typingctx, target, source, count, is_bf16):
    """target = source as float32; source: bfloat16 if is_bf16, else float32."""

    def codegen(context, builder, signature, args):
        target, source, count, is_bf16 = args

        def widen(offset, width):
            bits = builder.load(_at(builder, source, offset, _SHORT, width), align=2)
            wide = builder.shl(builder.zext(bits, _kind(_INT, width)), _constant(16, width))
            builder.store(wide, _at(builder, target, offset, _INT, width), align=4)

        def copy(offset, width):
            bits = builder.load(_at(builder, source, offset, _INT, width), align=4)
            builder.store(bits, _at(builder, target, offset, _INT, width), align=4)

        with builder.if_else(is_bf16) as (then, otherwise):
            with then:
                _for_each(builder, count, widen)
            with otherwise:
                _for_each(builder, count, copy)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.boolean), codegen


@intrinsic
def store_row(typingctx, target, source, count, is_bf16):
    """target = source, which is float32; target: bfloat16 if is_bf16, else float32."""

    def codegen(context, builder, signature, args):
        target, source, count, is_bf16 = args

        def load(offset, width):
            return builder.load(_at(builder, source, offset, _FLOAT, width), align=4)

        def narrow(offset, width):
            bits = _to_bf16(builder, load(offset, width), width)
            builder.store(bits, _at(builder, target, offset, _SHORT, width), align=2)

        def copy(offset, width):
            at = _at(builder, target, offset, _FLOAT, width)
            builder.store(load(offset, width), at, align=4)

        with builder.if_else(is_bf16) as (then, otherwise):
            with then:
                _for_each(builder, count, narrow)
            with otherwise:
                _for_each(builder, count, copy)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3, types.boolean), codegen


@intrinsic
def add_row(typingctx, target, source, count):
    """target += source, float32."""

    def codegen(context, builder, signature, args):
        target, source, count = args

        def add(offset, width):
            at = _at(builder, target, offset, _FLOAT, width)
            more = builder.load(_at(builder, source, offset, _FLOAT, width), align=4)
            builder.store(builder.fadd(builder.load(at, align=4), more), at, align=4)

        _for_each(builder, count, add)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def clear(typingctx, target, count):
    """target = 0, float32."""

    def codegen(context, builder, signature, args):
        target, count = args

        def zero(offset, width):
            at = _at(builder, target, offset, _INT, width)
            builder.store(_constant(0, width), at, align=4)

        _for_each(builder, count, zero)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 2), codegen


@intrinsic
def load_word(typingctx, address):
    """An int64 that other threads change; also a fence."""

    def codegen(context, builder, signature, args):
        return builder.load_atomic(_pointer(builder, args[0], _LONG), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_word(typingctx, address, word):
    """The other side of load_word."""

    def codegen(context, builder, signature, args):
        builder.store_atomic(args[1], _pointer(builder, args[0], _LONG), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def swap_word(typingctx, address, expected, word):
    """Write a word if the expected one is still there, and say whether."""

    def codegen(context, builder, signature, args):
        at = _pointer(builder, args[0], _LONG)
        result = builder.cmpxchg(at, args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(result, 1)

    return types.boolean(*[types.int64] * 3), codegen


@intrinsic
def pause(typingctx):
    """Let some cycles go by while waiting for another thread."""

    def codegen(context, builder, signature, args):
        machine = platform.machine().lower()
        if machine in ("x86_64", "amd64"):
            _call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        elif machine in ("aarch64", "arm64"):
            _call(builder, "llvm.aarch64.hint", ir.VoidType(), [_INT(1)])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Let another thread have this core, if one is waiting for it."""

    def codegen(context, builder, signature, args):
        _call(builder, "sched_yield", _INT, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def read_byte(typingctx, descriptor):
    """Sleep until there is a byte, and take it, or a signal; False at the end of the pipe."""

    def codegen(context, builder, signature, args):
        byte = cgutils.alloca_once(builder, _BYTE)
        descriptor = builder.trunc(args[0], _INT)
        size = _call(builder, "read", _LONG, [descriptor, byte, _LONG(1)])
        return builder.icmp_signed("!=", size, _LONG(0))

    return types.boolean(types.int64), codegen


@intrinsic
def write_byte(typingctx, descriptor):
    """Wake the reader."""

    def codegen(context, builder, signature, args):
        byte = cgutils.alloca_once_value(builder, _BYTE(0))
        descriptor = builder.trunc(args[0], _INT)
        _call(builder, "write", _LONG, [descriptor, byte, _LONG(1)])
        return context.get_dummy_value()

    return types.void(types.int64), codegen
