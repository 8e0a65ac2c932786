# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""Vector instructions for the CPU kernels: what LLVM does not find by itself in numba's loops.

Each intrinsic is one loop over whole SIMD vectors whose accumulators stay in registers. Addresses
count bytes; steps and counts count float32 elements (bfloat16 ones where it says so). Wider
vectors than the machine has are split by LLVM, so nothing here asks which machine it is.

NOTE: numba's cache looks at cpu_kernels.py only: after a change here, touch that file too.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

PRODUCT_ROWS = 8  # accumulators of one small matrix product: enough to hide the latency
COPY_WIDTH = 8

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_EXP2 = (  # 2 ** f for |f| <= 1/2, highest power first: the polynomial of Cephes' exp2f
    1.535336188319500e-4,
    1.339887440266574e-3,
    9.618437357674640e-3,
    5.550332471162809e-2,
    2.402264791363012e-1,
    6.931472028550421e-1,
    1.0,
)


def _at(builder, address, offset, kind):
    """Pointer to `kind` at an address plus a number of float32 elements."""
    byte = builder.add(address, builder.mul(offset, offset.type(4)))
    return builder.inttoptr(byte, kind.as_pointer())


def _fused(builder, a, b, c):
    """a * b + c; the flag lets LLVM fuse the two where the machine can."""
    flags = ("contract",)
    return builder.fadd(builder.fmul(a, b, flags=flags), c, flags=flags)


def _exp2(builder, x, width):
    """2 ** x for x <= 0 to about 1e-7; a NaN stays one."""
    vector, ints = ir.VectorType(_FLOAT, width), ir.VectorType(_INT, width)

    def constant(value):
        return ir.Constant(vector, [value] * width)

    is_tiny = builder.fcmp_ordered("<", x, constant(-126.0))
    x = builder.select(is_tiny, constant(-126.0), x)
    whole = builder.fptosi(builder.fsub(x, constant(0.5)), ints)
    fraction = builder.fsub(x, builder.sitofp(whole, vector))
    power = constant(_EXP2[0])
    for coefficient in _EXP2[1:]:
        power = _fused(builder, power, fraction, constant(coefficient))
    exponent = builder.add(whole, ir.Constant(ints, [127] * width))
    scale = builder.shl(exponent, ir.Constant(ints, [23] * width))
    return builder.fmul(power, builder.bitcast(scale, vector))


def _add_products(width):
    """dst[i, :width] += sum over t < count of a[i, t] * x[t, :width], for PRODUCT_ROWS rows i.

    dst[i] = dst + i * dst_step, a[i, t] = a + i * a_row + t * a_column, x[t] = x + t * x_step.
    """

    @intrinsic
    def add_products(typingctx, dst, dst_step, a, a_row, a_column, x, x_step, count):
        vector = ir.VectorType(_FLOAT, width)
        undefined = ir.Constant(vector, ir.Undefined)
        everywhere = ir.Constant(ir.VectorType(_INT, width), [0] * width)

        def codegen(context, builder, signature, args):
            dst, dst_step, a, a_row, a_column, x, x_step, count = args
            rows = [dst.type(i) for i in range(PRODUCT_ROWS)]
            targets = [_at(builder, dst, builder.mul(row, dst_step), vector) for row in rows]
            sums = [cgutils.alloca_once(builder, vector) for _ in rows]
            for target, total in zip(targets, sums, strict=True):
                builder.store(builder.load(target, align=4), total)
            with cgutils.for_range(builder, count) as loop:
                x_offset = builder.mul(loop.index, x_step)
                x_t = builder.load(_at(builder, x, x_offset, vector), align=4)
                column = builder.mul(loop.index, a_column)
                for row, total in zip(rows, sums, strict=True):
                    a_offset = builder.add(column, builder.mul(row, a_row))
                    a_it = builder.load(_at(builder, a, a_offset, _FLOAT), align=4)
                    first = builder.insert_element(undefined, a_it, _INT(0))
                    spread = builder.shuffle_vector(first, undefined, everywhere)
                    builder.store(_fused(builder, spread, x_t, builder.load(total)), total)
            for target, total in zip(targets, sums, strict=True):
                builder.store(builder.load(total), target, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return add_products


def _weigh(width):
    """One step of the online softmax, base 2, over a column [count, width] of scores.

    Scores become weights relative to the new top; total takes them in. shrink is what the rise
    of the top does to everything that was summed under the old one. top, total, shrink: [width].
    """

    @intrinsic
    def weigh(typingctx, scores, step, count, top, total, shrink):
        vector = ir.VectorType(_FLOAT, width)

        def codegen(context, builder, signature, args):
            scores, step, count, top, total, shrink = args
            zero = count.type(0)
            tops = _at(builder, top, zero, vector)
            totals = _at(builder, total, zero, vector)
            old_top = builder.load(tops, align=4)
            highest, summed = (cgutils.alloca_once(builder, vector) for _ in range(2))
            builder.store(old_top, highest)
            with cgutils.for_range(builder, count) as loop:
                score_at = _at(builder, scores, builder.mul(loop.index, step), vector)
                score, high = builder.load(score_at, align=4), builder.load(highest)
                is_higher = builder.fcmp_ordered(">", score, high)
                builder.store(builder.select(is_higher, score, high), highest)
            new_top = builder.load(highest)
            shrinks = _exp2(builder, builder.fsub(old_top, new_top), width)
            builder.store(builder.fmul(builder.load(totals, align=4), shrinks), summed)
            with cgutils.for_range(builder, count) as loop:
                score_at = _at(builder, scores, builder.mul(loop.index, step), vector)
                score = builder.load(score_at, align=4)
                weight = _exp2(builder, builder.fsub(score, new_top), width)
                builder.store(weight, score_at, align=4)
                builder.store(builder.fadd(builder.load(summed), weight), summed)
            builder.store(new_top, tops, align=4)
            builder.store(builder.load(summed), totals, align=4)
            builder.store(shrinks, _at(builder, shrink, zero, vector), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), codegen

    return weigh


add_products_8, add_products_16 = _add_products(8), _add_products(16)
weigh_8, weigh_16 = _weigh(8), _weigh(16)


@intrinsic
def pointer(typingctx, address):
    """An address as a pointer that `carray` takes."""

    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@intrinsic
def copy_f32(typingctx, target, source, num_vectors):
    """Copy num_vectors * COPY_WIDTH float32 numbers."""
    vector = ir.VectorType(_FLOAT, COPY_WIDTH)

    def codegen(context, builder, signature, args):
        target, source, num_vectors = args
        with cgutils.for_range(builder, num_vectors) as loop:
            offset = builder.mul(loop.index, loop.index.type(COPY_WIDTH))
            values = builder.load(_at(builder, source, offset, vector), align=4)
            builder.store(values, _at(builder, target, offset, vector), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen


@intrinsic
def widen_bf16(typingctx, target, source, num_vectors):
    """Copy num_vectors * COPY_WIDTH bfloat16 numbers to float32."""
    vector, ints = ir.VectorType(_FLOAT, COPY_WIDTH), ir.VectorType(_INT, COPY_WIDTH)
    halves = ir.VectorType(ir.IntType(16), COPY_WIDTH)

    def codegen(context, builder, signature, args):
        target, source, num_vectors = args
        with cgutils.for_range(builder, num_vectors) as loop:
            half_offset = builder.mul(loop.index, loop.index.type(COPY_WIDTH // 2))
            bits = builder.load(_at(builder, source, half_offset, halves), align=2)
            wide = builder.shl(builder.zext(bits, ints), ir.Constant(ints, [16] * COPY_WIDTH))
            offset = builder.mul(loop.index, loop.index.type(COPY_WIDTH))
            target_at = _at(builder, target, offset, vector)
            builder.store(builder.bitcast(wide, vector), target_at, align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), codegen
