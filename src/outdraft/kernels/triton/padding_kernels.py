# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
# Triton infers the types of these functions and specialises on them.
"""Copies of the rows of a pass to buffers of rounded sizes, in one kernel.

Names are those of attention/base.py; `to_` before one names its copy.
"""

import triton
import triton.language as tl

_SIZES = ["num_rows", "num_requests", "num_blocks", "to_rows", "to_requests", "to_blocks", "stride"]
_POINTERS = ["ids", "positions", "slots", "ancestors", "starts", "contexts", "num_causal", "table"]


@triton.jit
def _pad(source, target, place, size, to_size, padding):
    numbers = tl.load(source + place, mask=place < size, other=padding)
    tl.store(target + place, numbers.to(target.dtype.element_ty), mask=place < to_size)


# Where a source begins says nothing: one kernel serves all of them.
@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_POINTERS)
def pad_rows(
    ids,
    positions,
    slots,
    ancestors,
    starts,
    contexts,
    num_causal,
    table,
    to_ids,
    to_positions,
    to_slots,
    to_ancestors,
    to_starts,
    to_contexts,
    to_num_causal,
    to_table,
    num_rows,
    num_requests,
    num_blocks,
    to_rows,
    to_requests,
    to_blocks,
    stride,  # of the table
    WIDTH: tl.constexpr,  # at least one more than `to_rows` and `to_requests`
    TILE: tl.constexpr,
):
    """Grid: [to_requests + 1]; a program for each row of the table, and one for the rest."""
    request = tl.program_id(0)
    if request < to_requests:
        # A request that is padding has blocks, too: numbers of block 0, which are not read.
        size = tl.where(request < num_requests, num_blocks, 0)
        source = table + request.to(tl.int64) * stride
        target = to_table + request.to(tl.int64) * to_blocks
        for first in range(0, to_blocks, TILE):
            _pad(source, target, first + tl.arange(0, TILE), size, to_blocks, 0)
    else:
        place = tl.arange(0, WIDTH)
        _pad(ids, to_ids, place, num_rows, to_rows, 0)
        _pad(positions, to_positions, place, num_rows, to_rows, 0)
        _pad(slots, to_slots, place, num_rows, to_rows, -1)
        _pad(ancestors, to_ancestors, place, num_rows, to_rows, 0)
        _pad(starts, to_starts, place, num_requests + 1, to_requests + 1, num_rows)
        _pad(contexts, to_contexts, place, num_requests, to_requests, 0)
        _pad(num_causal, to_num_causal, place, num_requests, to_requests, 0)
