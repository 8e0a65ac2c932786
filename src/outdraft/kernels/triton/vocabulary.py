# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false
# ruff: noqa: ANN001, ANN201
# Triton infers the types of these functions and specialises on them.
"""Parts of the kernels that choose tokens of a vocabulary in splits.

Dimension key: Q splits of a vocabulary, W ids of one.
"""

import triton
import triton.language as tl

NO_ID = tl.constexpr(1 << 62)  # after all others


@triton.jit
def first_row_of(num_drafts, request):
    """int64: the flat row of a request's root."""
    root = tl.full((), 0, tl.int64)
    for first in range(0, request, 128):
        before_B = first + tl.arange(0, 128)
        root += tl.sum(tl.load(num_drafts + before_B, mask=before_B < request, other=-1) + 1)
    return root


@triton.jit
def softmax_of_split(logits, row, split, size, tops, totals, TILE: tl.constexpr):
    """Store the largest logit of a row's split, and the sum of exp(logit - it)."""
    id_V = split * TILE + tl.arange(0, TILE)
    logit_V = tl.load(logits + row * size + id_V, mask=id_V < size, other=float("-inf"))
    top = tl.max(logit_V)
    base = tl.where(top > float("-inf"), top, 0.0)
    place = row * tl.num_programs(1) + split
    tl.store(tops + place, top)
    tl.store(totals + place, tl.sum(tl.exp(logit_V - base)))


@triton.jit
def softmax_of_row(tops, totals, row, NUM_SPLITS: tl.constexpr, SPLITS: tl.constexpr):
    """A row's base and sum, from those of its splits: p = exp(logit - base) / sum."""
    place_Q = tl.arange(0, SPLITS)
    is_split_Q = place_Q < NUM_SPLITS
    least = float("-inf")
    top_Q = tl.load(tops + row * NUM_SPLITS + place_Q, mask=is_split_Q, other=least)
    total_Q = tl.load(totals + row * NUM_SPLITS + place_Q, mask=is_split_Q, other=0.0)
    top = tl.max(top_Q)
    base = tl.where(top > least, top, 0.0)
    return base, tl.sum(total_Q * tl.exp(top_Q - base))


@triton.jit
def best(value_W, token_W):
    """The largest value, and the lowest id that has it."""
    largest = tl.max(value_W)
    return largest, tl.min(tl.where(value_W == largest, token_W, NO_ID))


@triton.jit
def better(value, token, other_value, other_token):
    """The larger value; of equal ones that of the lower id."""
    takes = (other_value > value) | ((other_value == value) & (other_token < token))
    return tl.where(takes, other_value, value), tl.where(takes, other_token, token)


@triton.jit
def best_of_splits(values, ids, request, NUM_SPLITS: tl.constexpr, SPLITS: tl.constexpr):
    """A request's id of the largest value; both lie by splits."""
    place_Q = tl.arange(0, SPLITS)
    is_split_Q, parts_Q = place_Q < NUM_SPLITS, request * NUM_SPLITS + place_Q
    value_Q = tl.load(values + parts_Q, mask=is_split_Q, other=float("-inf"))
    _, token = best(value_Q, tl.load(ids + parts_Q, mask=is_split_Q, other=NO_ID))
    return token
