# pyright: basic, reportCallIssue=false, reportPrivateImportUsage=false
# ruff: noqa: ANN001, ANN201, ANN202
# numba infers the types of these functions and specialises on them.
"""The compiled half of linear_bf16.py: products of float32 rows and bfloat16 weights.

Everything is an address or a number: arrays would cost more to unpack than a small product takes,
and more to compile than the rest together. The inner loops are in linear_simd.py.

A product is cut into units, each some tiles of outputs. Alone, one thread computes them all. In a
team (linear_team.py), the thread that comes first claims a unit. A helper computes into its own
memory and stores the result only if the unit is still its own. The caller never waits for a helper
that lost its core: it takes the unit back, computes it again, and then works alone for a while. The
result of the late helper, whose inputs may have changed meanwhile, is thrown away.

Dimension key: R rows of one block, D inputs, E outputs.
"""

from typing import NamedTuple

import numpy as np

from outdraft.core.jit import njit
from outdraft.models.layers.linear_simd import (
    MAX_PRODUCT_ROWS,
    TILE,
    add_row,
    clear,
    load_row,
    load_word,
    pause,
    product_1,
    product_3,
    product_5,
    product_8,
    read_byte,
    store_row,
    store_word,
    swap_word,
    write_byte,
    yield_core,
)

_BLOCK_ROWS = 64  # rows that meet a tile while it is in the cache, itself read from memory once
_MAX_UNUSED = 2  # rows of a product behind the last one; zeros, as rubbish can be slow to multiply
_ROW_GAP = 16  # numbers behind each row of a block: rows must not share the sets of the cache
_PIECE = 64  # pairs of inputs that are summed apart: long sums in float32 lose digits

# A team is words of 8 bytes, and its block of rows. Words that threads wait for have their line.
JOB, LOCK, NUM_HELPERS, BLOCK, BLOCK_INPUTS, ALONE, _FIELDS, _HELPERS = 0, 8, 16, 17, 18, 19, 24, 40
_IS_ASLEEP, WORKS_ON, WAKE_READ, WAKE_WRITE, _HELPER_WORDS = 0, 8, 16, 17, 24
MAX_UNITS = 1024
STOP = -1  # as a job
_FREE, _CLAIMED, _STORING, _DONE = 0, 1, 2, 3  # a unit's word is 4 * job + one of these
_SPINS = 2000  # about 0.1 ms: longer than what lies between two products of a step
_PATIENCE = 2048  # spins for a unit of another thread, beside those for its work
_BACK_OFF = 64  # products to do alone after a helper was late: the cores are busy with others
_MIN_SHARED = 1 << 16  # weights, times products of all rows: below, sharing costs what it saves


class Job(NamedTuple):
    """One block of rows. All but the numbers are addresses."""

    weights: int
    bias: int
    rows: int  # float32 [R, D], and _MAX_UNUSED rows of zeros
    out: int  # [R, E] contiguous
    row_bytes: int  # from row to row
    num_rows: int
    num_inputs: int
    num_outputs: int
    is_bf16: int  # out; else float32
    num_units: int
    unit_outputs: int


def team_words(num_helpers: int) -> int:
    """How many words a team takes."""
    return _HELPERS + num_helpers * _HELPER_WORDS + MAX_UNITS


def helper_word(helper: int, field: int) -> int:
    """Which word of a team holds a field of a helper."""
    return _HELPERS + helper * _HELPER_WORDS + field


@njit
def block_numbers(num_inputs):
    """How many float32 numbers the block of rows of a product takes."""
    return (_BLOCK_ROWS + _MAX_UNUSED) * (num_inputs + num_inputs % 2 + _ROW_GAP)


@njit(nogil=True, cache=True)
def multiply(weights, bias, x, x_step, out, num_rows, num_inputs, num_outputs, is_bf16):
    """As multiply_together, but alone."""
    multiply_together(0, weights, bias, x, x_step, out, num_rows, num_inputs, num_outputs, is_bf16)


@njit(nogil=True, cache=True)
def multiply_together(
    team, weights, bias, x, x_step, out, num_rows, num_inputs, num_outputs, is_bf16
):
    """out = x W^T + b for any number of rows. All but the numbers are addresses.

    Args:
        team: of linear_team.py, or 0: the calling thread computes alone, as it also does while
            another one has the team.
        weights: tiles of linear_bf16.pack_tiles.
        bias: float32 [E]; 0: none.
        x: [T, D], rows x_step elements apart; bfloat16 if is_bf16, else float32.
        out: [T, E] contiguous, of x's dtype.
    """
    own = np.empty(block_numbers(num_inputs) + _BLOCK_ROWS * TILE, np.float32)
    rows, sums = own.ctypes.data, own.ctypes.data + 4 * block_numbers(num_inputs)
    num_products = (num_rows + MAX_PRODUCT_ROWS - 1) // MAX_PRODUCT_ROWS
    is_shared = team != 0 and num_products * num_inputs * num_outputs >= _MIN_SHARED
    is_shared = is_shared and num_inputs <= load_word(team + 8 * BLOCK_INPUTS)
    is_shared = is_shared and swap_word(team + 8 * LOCK, 0, 1)
    if is_shared and load_word(team + 8 * ALONE) > 0:
        store_word(team + 8 * ALONE, load_word(team + 8 * ALONE) - 1)
        store_word(team + 8 * LOCK, 0)
        is_shared = False
    if is_shared:
        rows = load_word(team + 8 * BLOCK)
    row_bytes = 4 * (num_inputs + num_inputs % 2 + _ROW_GAP)
    num_tiles = (num_outputs + TILE - 1) // TILE
    unit_tiles = (num_tiles + MAX_UNITS - 1) // MAX_UNITS
    item = 2 if is_bf16 else 4
    for first_row in range(0, num_rows, _BLOCK_ROWS):
        block_rows = min(_BLOCK_ROWS, num_rows - first_row)
        for r in range(block_rows):
            row = rows + r * row_bytes
            load_row(row, x + item * (first_row + r) * x_step, num_inputs, is_bf16)
            clear(row + 4 * num_inputs, _ROW_GAP)
        clear(rows + block_rows * row_bytes, _MAX_UNUSED * row_bytes // 4)
        job = Job(
            weights,
            bias,
            rows,
            out + item * first_row * num_outputs,
            row_bytes,
            block_rows,
            num_inputs,
            num_outputs,
            np.int64(is_bf16),
            (num_tiles + unit_tiles - 1) // unit_tiles,
            unit_tiles * TILE,
        )
        _run(job, team if is_shared else 0, sums)
    if is_shared:
        store_word(team + 8 * LOCK, 0)


@njit
def _run(job, team, sums):
    """Compute all units of a job, helped by the team if it is not 0."""
    number = 0
    if team != 0:
        number = load_word(team + 8 * JOB) + 1
        _publish(team, job, number)
    for unit in range(job.num_units):
        if team == 0 or claim_unit(team, unit, number):
            _compute(job, unit, sums, 0, 0)
            if team != 0:
                store_word(_unit(team, unit), 4 * number + _DONE)
    if team != 0:
        for unit in range(job.num_units):
            if not _is_done_in_time(team, job, unit, number):
                store_word(team + 8 * ALONE, _BACK_OFF)
                _compute(job, unit, sums, 0, 0)


@njit(nogil=True, cache=True)
def help_team(team, helper):
    """The loop of a helper; returns when the team stops or its pipe is closed."""
    own = np.empty(_BLOCK_ROWS * TILE, np.float32)
    line = team + 8 * (_HELPERS + helper * _HELPER_WORDS)
    last, spins = 0, 0
    while True:
        number = load_word(team + 8 * JOB)
        if number == STOP:
            return
        if number != last:
            store_word(line + 8 * WORKS_ON, number)
            _help(team, helper, number, own.ctypes.data)
            store_word(line + 8 * WORKS_ON, 0)
            last, spins = number, 0
        elif spins < _SPINS:
            spins += 1
            pause()
        else:
            store_word(line + 8 * _IS_ASLEEP, 1)
            is_open = read_byte(load_word(line + 8 * WAKE_READ))
            store_word(line + 8 * _IS_ASLEEP, 0)
            if not is_open:
                return
            spins = 0


@njit
def _help(team, helper, number, sums):
    """Units of one job, beginning far from where the others begin.

    The job may end while its fields are read, and the next one may change them: then there is no
    unit left to claim.
    """
    fields = team + 8 * _FIELDS
    job = Job(
        load_word(fields),
        load_word(fields + 8),
        load_word(fields + 16),
        load_word(fields + 24),
        load_word(fields + 32),
        load_word(fields + 40),
        load_word(fields + 48),
        load_word(fields + 56),
        load_word(fields + 64),
        load_word(fields + 72),
        load_word(fields + 80),
    )
    num_helpers = load_word(team + 8 * NUM_HELPERS)
    start = job.num_units * (helper + 1) // (num_helpers + 1)
    for i in range(job.num_units):
        unit = start + i if start + i < job.num_units else start + i - job.num_units
        if claim_unit(team, unit, number):
            _compute(job, unit, sums, _unit(team, unit), number)


@njit
def _publish(team, job, number):
    fields = team + 8 * _FIELDS
    store_word(fields, job.weights)
    store_word(fields + 8, job.bias)
    store_word(fields + 16, job.rows)
    store_word(fields + 24, job.out)
    store_word(fields + 32, job.row_bytes)
    store_word(fields + 40, job.num_rows)
    store_word(fields + 48, job.num_inputs)
    store_word(fields + 56, job.num_outputs)
    store_word(fields + 64, job.is_bf16)
    store_word(fields + 72, job.num_units)
    store_word(fields + 80, job.unit_outputs)
    for unit in range(job.num_units):
        store_word(_unit(team, unit), 4 * number + _FREE)
    store_word(team + 8 * JOB, number)
    for helper in range(load_word(team + 8 * NUM_HELPERS)):
        line = team + 8 * (_HELPERS + helper * _HELPER_WORDS)
        if load_word(line + 8 * _IS_ASLEEP) != 0 and swap_word(line + 8 * _IS_ASLEEP, 1, 0):
            write_byte(load_word(line + 8 * WAKE_WRITE))


@njit
def _unit(team, unit):
    """Address of a unit's word."""
    num_helpers = load_word(team + 8 * NUM_HELPERS)
    return team + 8 * (_HELPERS + num_helpers * _HELPER_WORDS + unit)


@njit(nogil=True, cache=True)
def claim_unit(team, unit, number):
    """Whether the caller may compute a unit of a job: no other thread did or does."""
    word = _unit(team, unit)
    is_free = load_word(word) == 4 * number + _FREE
    return is_free and swap_word(word, 4 * number + _FREE, 4 * number + _CLAIMED)


@njit
def _is_done_in_time(team, job, unit, number):
    """Wait for a unit as long as it should take; False: it was taken back from a late helper."""
    word = _unit(team, unit)
    patience = _PATIENCE + (job.num_rows + 8) * job.num_inputs * job.unit_outputs // 64
    spins = 0
    while True:
        state = load_word(word)
        if state == 4 * number + _DONE:
            return True
        if spins > patience:
            if swap_word(word, 4 * number + _CLAIMED, 4 * number + _DONE):
                return False
            yield_core()  # it is storing, which is short
        spins += 1
        pause()


@njit
def _compute(job, unit, sums, word, number):
    """Compute and store a unit; a helper, whose unit has a word, only if it is still wanted."""
    num_pairs = (job.num_inputs + 1) // 2
    start = unit * job.unit_outputs
    item = 2 if job.is_bf16 != 0 else 4
    for first in range(start, min(start + job.unit_outputs, job.num_outputs), TILE):
        _add_tile(job, job.weights + 4 * first * num_pairs, num_pairs, sums)
        if word != 0 and not swap_word(word, 4 * number + _CLAIMED, 4 * number + _STORING):
            return
        num_outputs = min(TILE, job.num_outputs - first)
        for r in range(job.num_rows):
            row = sums + 4 * TILE * r
            if job.bias != 0:
                add_row(row, job.bias + 4 * first, num_outputs)
            out = job.out + item * (r * job.num_outputs + first)
            store_row(out, row, num_outputs, job.is_bf16 != 0)
        if word != 0:
            is_last = first + TILE >= min(start + job.unit_outputs, job.num_outputs)
            store_word(word, 4 * number + (_DONE if is_last else _CLAIMED))


@njit
def _add_tile(job, weights, num_pairs, sums):
    """sums [R, TILE] = the products with one tile of weights."""
    clear(sums, job.num_rows * TILE)
    for r in range(0, job.num_rows, MAX_PRODUCT_ROWS):
        for pair in range(0, num_pairs, _PIECE):
            _add_products(
                job.num_rows - r,
                weights + 4 * TILE * pair,
                job.rows + r * job.row_bytes + 8 * pair,
                job.row_bytes,
                min(_PIECE, num_pairs - pair),
                sums + 4 * TILE * r,
            )


@njit
def _add_products(num_rows, weights, x, x_row_bytes, num_pairs, out):
    """As of the fewest rows that are enough: the others are read and written, and mean nothing."""
    if num_rows > 5:
        product_8(weights, x, x_row_bytes, num_pairs, out)
    elif num_rows > 3:
        product_5(weights, x, x_row_bytes, num_pairs, out)
    elif num_rows > 1:
        product_3(weights, x, x_row_bytes, num_pairs, out)
    else:
        product_1(weights, x, x_row_bytes, num_pairs, out)
