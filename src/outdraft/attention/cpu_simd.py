# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""Vector instructions for the CPU kernels: what LLVM does not find by itself in numba's loops.

Each intrinsic is one loop over whole SIMD vectors whose accumulators stay in registers. Addresses
count bytes; steps and counts count float32 elements (bfloat16 ones where it says so). Wider
vectors than the machine has are split by LLVM, so nothing here asks which machine it is.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

WIDTH = 16  # numbers of one vector
LANES, KEYS = 2, 8  # of one call of `dots`: their sums fill half the registers of AVX-512
COPY_WIDTH = 8

_FLOAT = ir.FloatType()
_INT, _LONG = ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_FLOAT, WIDTH), ir.VectorType(_INT, WIDTH)
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


def _vector_at(builder, address, offset=0):
    return builder.inttoptr(builder.add(address, _LONG(offset)), _FLOATS.as_pointer())


def _load_row_address(builder, rows, index, offset):
    """Address number `index` of an array of addresses, plus an offset."""
    place = builder.add(rows, builder.mul(index, _LONG(8)))
    return builder.add(builder.load(builder.inttoptr(place, _LONG.as_pointer())), offset)


def _spread(builder, address):
    """A vector of the one number at an address."""
    number = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()), align=4)
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    everywhere = ir.Constant(_INTS, [0] * WIDTH)
    return builder.shuffle_vector(
        builder.insert_element(undefined, number, _INT(0)), undefined, everywhere
    )


def _sums_of(builder, vectors):
    """One vector whose number i is the sum of vectors[i]; every sum is taken in the same order."""
    distance = 1
    while distance < WIDTH:
        # Number i of a pair's result comes from the one or the other, as bit `distance` of i says.
        own = [i + WIDTH * bool(i & distance) for i in range(WIDTH)]
        other = [(i ^ distance) + WIDTH * bool(i & distance) for i in range(WIDTH)]
        vectors = [
            builder.fadd(
                builder.shuffle_vector(first, second, ir.Constant(_INTS, own)),
                builder.shuffle_vector(first, second, ir.Constant(_INTS, other)),
            )
            for first, second in zip(vectors[::2], vectors[1::2], strict=True)
        ]
        distance *= 2
    return vectors[0]


def _across(builder, vector, combine):
    """A vector of nothing but the combination of all numbers of one."""
    distance = 1
    while distance < WIDTH:
        turned = ir.Constant(_INTS, [i ^ distance for i in range(WIDTH)])
        other = builder.shuffle_vector(vector, ir.Constant(_FLOATS, ir.Undefined), turned)
        vector = combine(vector, other)
        distance *= 2
    return vector


def _higher(builder, a, b):
    """The higher numbers; of a NaN and a number the second."""
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def dots(typingctx, q, q_step, rows, offset, num_vectors, out, out_step):
    """out[lane, key] = q[lane] . k[key] for LANES lanes and KEYS keys.

    rows: address of KEYS addresses; a key's numbers begin `offset` bytes behind its address.
    """

    def codegen(context, builder, signature, args):
        q, q_step, rows, offset, num_vectors, out, out_step = args
        lanes = [builder.add(q, builder.mul(q_step, _LONG(4 * i))) for i in range(LANES)]
        keys = [_load_row_address(builder, rows, _LONG(i), offset) for i in range(KEYS)]
        zero = ir.Constant(_FLOATS, [0.0] * WIDTH)
        sums = [[cgutils.alloca_once_value(builder, zero) for _ in keys] for _ in lanes]
        with cgutils.for_range(builder, num_vectors) as loop:
            byte = builder.mul(loop.index, _LONG(4 * WIDTH))
            parts = [
                builder.load(_vector_at(builder, builder.add(lane, byte)), align=4)
                for lane in lanes
            ]
            for i, key in enumerate(keys):
                k_part = builder.load(_vector_at(builder, builder.add(key, byte)), align=4)
                for q_part, totals in zip(parts, sums, strict=True):
                    total = _fused(builder, q_part, k_part, builder.load(totals[i]))
                    builder.store(total, totals[i])
        both = _sums_of(builder, [builder.load(total) for totals in sums for total in totals])
        half = ir.VectorType(_FLOAT, KEYS)
        for lane in range(LANES):
            chosen = ir.Constant(
                ir.VectorType(_INT, KEYS), [lane * KEYS + key for key in range(KEYS)]
            )
            part = builder.shuffle_vector(both, ir.Constant(_FLOATS, ir.Undefined), chosen)
            at = builder.add(out, builder.mul(out_step, _LONG(4 * lane)))
            builder.store(part, builder.inttoptr(at, half.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


@intrinsic
def weigh(typingctx, scores, num_vectors, top, total, shrink):
    """One step of a lane's online softmax, base 2, over num_vectors * WIDTH scores.

    Scores become weights relative to the new top; total takes them in. shrink is what the rise
    of the top does to everything that was summed under the old one. All but num_vectors are
    addresses.
    """

    def codegen(context, builder, signature, args):
        scores, num_vectors, top, total, shrink = args
        old_top = _spread(builder, top)
        highest = cgutils.alloca_once_value(builder, old_top)
        summed = cgutils.alloca_once_value(builder, ir.Constant(_FLOATS, [0.0] * WIDTH))
        with cgutils.for_range(builder, num_vectors) as loop:
            at = builder.add(scores, builder.mul(loop.index, _LONG(4 * WIDTH)))
            score, high = builder.load(_vector_at(builder, at), align=4), builder.load(highest)
            builder.store(_higher(builder, score, high), highest)
        new_top = _across(builder, builder.load(highest), lambda a, b: _higher(builder, a, b))
        with cgutils.for_range(builder, num_vectors) as loop:
            at = builder.add(scores, builder.mul(loop.index, _LONG(4 * WIDTH)))
            score = builder.load(_vector_at(builder, at), align=4)
            weight = _exp2(builder, builder.fsub(score, new_top), WIDTH)
            builder.store(weight, _vector_at(builder, at), align=4)
            builder.store(builder.fadd(builder.load(summed), weight), summed)
        shrinks = _exp2(builder, builder.fsub(old_top, new_top), WIDTH)
        factor = builder.extract_element(shrinks, _INT(0))
        sums = _across(builder, builder.load(summed), builder.fadd)
        added = builder.extract_element(sums, _INT(0))
        total_at = builder.inttoptr(total, _FLOAT.as_pointer())
        before = builder.load(total_at, align=4)
        builder.store(builder.fadd(builder.fmul(before, factor), added), total_at, align=4)
        first = builder.extract_element(new_top, _INT(0))
        builder.store(first, builder.inttoptr(top, _FLOAT.as_pointer()), align=4)
        builder.store(factor, builder.inttoptr(shrink, _FLOAT.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 5), codegen


def _accumulate(num_vectors):
    """out[lane] = shrink[lane] * out[lane] + sum over keys of weights[lane, key] * v[key].

    For LANES lanes and num_vectors * WIDTH numbers of each; rows and offset as for `dots`.
    """

    @intrinsic
    def accumulate(typingctx, out, out_step, weights, weights_step, shrink, rows, offset, num_keys):
        def codegen(context, builder, signature, args):
            out, out_step, weights, weights_step, shrink, rows, offset, num_keys = args
            targets = [builder.add(out, builder.mul(out_step, _LONG(4 * i))) for i in range(LANES)]
            columns = [
                builder.add(weights, builder.mul(weights_step, _LONG(4 * i))) for i in range(LANES)
            ]
            sums = []
            for lane, target in enumerate(targets):
                factor = _spread(builder, builder.add(shrink, _LONG(4 * lane)))
                for vector in range(num_vectors):
                    at = _vector_at(builder, target, 4 * WIDTH * vector)
                    before = builder.fmul(builder.load(at, align=4), factor)
                    sums.append(cgutils.alloca_once_value(builder, before))
            with cgutils.for_range(builder, num_keys) as loop:
                row = _load_row_address(builder, rows, loop.index, offset)
                values = [
                    builder.load(_vector_at(builder, row, 4 * WIDTH * vector), align=4)
                    for vector in range(num_vectors)
                ]
                for lane, column in enumerate(columns):
                    at = builder.add(column, builder.mul(loop.index, _LONG(4)))
                    weight = _spread(builder, at)
                    for vector, value in enumerate(values):
                        total = sums[lane * num_vectors + vector]
                        summed = _fused(builder, weight, value, builder.load(total))
                        builder.store(summed, total)
            for lane, target in enumerate(targets):
                for vector in range(num_vectors):
                    total = builder.load(sums[lane * num_vectors + vector])
                    at = _vector_at(builder, target, 4 * WIDTH * vector)
                    builder.store(total, at, align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 8), codegen

    return accumulate


accumulate_1, accumulate_4 = _accumulate(1), _accumulate(4)


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
