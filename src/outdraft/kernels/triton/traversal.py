# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
# Triton infers the types of kernels and specialises on them. A launch takes more than their
# parameters.
"""Verification of drawn chains on a GPU: `traverse` of torch/verification.py, with kernels for all
that reads a vocabulary.

A chain's row i has the weight w_i, and one child that was drawn from q. Its p and its weight do not
depend on what comes after it, so what the child leaves of p,

    left_i = max(w_i * p_i - q, 0),

is summed for all rows at once. Sums over the vocabulary are made of its splits, in the same order
whatever stands beside a row.

Dimension key: B requests, N most drafts of one, R flat rows, Q splits of a vocabulary, V ids of a
split, W blocks of four neighbouring ids.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import pad

from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.noise import Purpose
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.torch import verification
from outdraft.kernels.triton import noise
from outdraft.kernels.triton.drafting import NO_ID, best, better
from outdraft.kernels.triton.noise import MASK, gumbel_of_word, philox

_TILE = 1024  # ids
_TINY = tl.constexpr(2.2250738585072014e-308)
# One kernel serves drafts of all widths, and small tensors wherever they begin: each that is
# compiled on the way takes longer than hundreds of steps.
_NUMBERS = ["size", "width"]
_SMALL = ["token_ids", "is_sampled", "num_drafts", "bases", "sums", "weights"]


def verify(
    processed_RV: Tensor,
    drafts: DraftBatch,
    sampling: SamplingBatch,
    num_tokens_B: Tensor,
    rule: Rule,
) -> Verdict:
    """Verify drawn chains by kernels of their own, everything else as the reference."""
    draws = drafts.any_sampled and sampling.any_draws and drafts.width > 0
    is_plain = rule == Rule.TRAVERSAL and drafts.is_chain and processed_RV.dtype == torch.float32
    if not (draws and is_plain):
        return verification.verify(processed_RV, drafts, sampling, num_tokens_B, rule, source=noise)
    step = verification.VerificationStep(processed_RV, drafts, sampling, num_tokens_B, noise)
    return step.beside_matched(_traverse_chains(step))


def _traverse_chains(step: verification.VerificationStep) -> Verdict:
    """Traversal verification of chains; the verdicts of `verification.traverse`."""
    drafts, logits_RV = step.drafts, step.processed_RV.contiguous()
    assert drafts.probs_BNV is not None
    assert drafts.is_sampled_BN is not None
    (num_rows, size), number, width = logits_RV.shape, drafts.num_requests, drafts.width
    num_splits, device = triton.cdiv(size, _TILE), logits_RV.device
    in_splits = {"NUM_SPLITS": num_splits, "SPLITS": triton.next_power_of_2(num_splits)}
    is_sampled_BN = drafts.is_sampled_BN.contiguous().view(torch.uint8)
    ids_BN, num_drafts_B = drafts.token_ids_BN.contiguous(), drafts.num_drafts_B.contiguous()
    chains = drafts.probs_BNV.contiguous(), ids_BN, is_sampled_BN, num_drafts_B
    tops_RQ, totals_RQ = (torch.empty(num_rows, num_splits, device=device) for _ in range(2))
    bases_R, sums_R = (torch.empty(num_rows, device=device) for _ in range(2))
    weights_BN1 = torch.empty(number, width + 1, dtype=torch.float64, device=device)
    of_rows = bases_R, sums_R, weights_BN1
    split_softmax[(num_rows, num_splits)](logits_RV, tops_RQ, totals_RQ, size, TILE=_TILE)
    weigh_rows[(number,)](
        logits_RV, tops_RQ, totals_RQ, *chains, *of_rows, size, width, **in_splits
    )
    # What is summed here is drawn from below.
    left_BNQ = torch.empty(number, width, num_splits, device=device)
    sum_left[(number, width, num_splits)](
        *(logits_RV, *chains, *of_rows, left_BNQ, size, width), TILE=_TILE, enable_fp_fusion=False
    )
    left_BN = torch.where(drafts.is_draft_BN, left_BNQ.sum(2, dtype=torch.float64), 0.0)
    accepted_B = _num_accepted(weights_BN1, left_BN, drafts, step.coins())
    rest_B = pad(left_BN, (0, 1)).gather(1, accepted_B[:, None])[:, 0].float()
    values_BQ = torch.empty(number, num_splits, device=device)
    best_BQ = torch.empty_like(values_BQ, dtype=torch.int64)
    tokens = step.num_tokens_B.contiguous(), step.sampling.seeds_B.contiguous()
    draw_last[(number, num_splits)](
        logits_RV,
        *(*chains, *tokens, *of_rows, accepted_B, rest_B, values_BQ, best_BQ, size, width),
        int(Purpose.RECOVER),
        int(Purpose.SAMPLE),
        TILE=_TILE // 4,
        enable_fp_fusion=False,
    )
    token_B = best_BQ.gather(1, values_BQ.argmax(1, keepdim=True))[:, 0]
    is_on_path_BN = torch.arange(width, device=device) < accepted_B[:, None]
    return verification.verdict_of_path(drafts, is_on_path_BN, token_B)


def _num_accepted(
    weights_BN1: Tensor, left_BN: Tensor, drafts: DraftBatch, coins_BN: Tensor
) -> Tensor:
    """int64 [B]. Rows are tested from the last one on: the path ends at the first coin below its
    row's weight."""
    bottom_BN = left_BN + (1.0 - weights_BN1[:, :-1])
    refused_BN = torch.where(left_BN > 0, left_BN / bottom_BN.where(bottom_BN > 0, 1.0), 0.0)
    is_refused_BN1 = pad(drafts.is_draft_BN, (0, 1))  # the last row has no child
    tested_BN1 = torch.where(is_refused_BN1, pad(refused_BN, (0, 1)), weights_BN1)
    return verification.last_row_B((coins_BN < tested_BN1[:, 1:]) & drafts.is_draft_BN)


@triton.jit(do_not_specialize=["size"])
def split_softmax(
    logits,  # float32 [R, size]
    tops,  # float32 [R, Q]
    totals,
    size,
    TILE: tl.constexpr,
):
    """The largest logit of each split, and the sum of exp(logit - it). Grid: [R, Q]."""
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    id_V = split * TILE + tl.arange(0, TILE)
    logit_V = tl.load(logits + row * size + id_V, mask=id_V < size, other=float("-inf"))
    top = tl.max(logit_V)
    base = tl.where(top > float("-inf"), top, 0.0)
    place = row * tl.num_programs(1) + split
    tl.store(tops + place, top)
    tl.store(totals + place, tl.sum(tl.exp(logit_V - base)))


@triton.jit
def first_row_of(num_drafts, request):
    """int64: the flat row of a request's root."""
    root = tl.full((), 0, tl.int64)
    for first in range(0, request, 128):
        before_B = first + tl.arange(0, 128)
        root += tl.sum(tl.load(num_drafts + before_B, mask=before_B < request, other=-1) + 1)
    return root


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


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SMALL)
def weigh_rows(
    logits,
    tops,
    totals,
    probs,  # float32 [B, N, size]
    token_ids,  # int64 [B, N]
    is_sampled,  # uint8 [B, N]
    num_drafts,
    bases,  # float32 [R]
    sums,
    weights,  # float64 [B, N + 1]
    size,
    width,  # N
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The softmax of each row, and its weight before its child is refused. Grid: [B]."""
    request = tl.program_id(0).to(tl.int64)
    root = first_row_of(num_drafts, tl.program_id(0))
    number = tl.load(num_drafts + request)
    weight = tl.full((), 1.0, tl.float64)
    for place in range(number + 1):
        row = root + place
        base, total = softmax_of_row(tops, totals, row, NUM_SPLITS, SPLITS)
        tl.store(bases + row, base)
        tl.store(sums + row, total)
        tl.store(weights + request * (width + 1) + place, weight)
        draft, is_draft = request * width + place, place < number
        token = tl.load(token_ids + draft, mask=is_draft, other=0)
        p = tl.exp(tl.load(logits + row * size + token) - base) / total
        drawn = tl.load(is_sampled + draft, mask=is_draft, other=0) != 0
        q = tl.load(probs + draft * size + token, mask=drawn, other=1.0)
        own = weight * p.to(tl.float64) / tl.maximum(q.to(tl.float64), _TINY)
        own = tl.where(q == q, own, 0.0)  # NaN, which a broken drafter may give
        weight = tl.minimum(own, 1.0)


@triton.jit
def _left(logits, chain, of_rows, request, row, place, id_V, size, width):
    """float32: what the child of a row leaves of its p."""
    probs, token_ids, is_sampled = chain
    bases, sums, weights = of_rows
    base, total = tl.load(bases + row), tl.load(sums + row)
    weight = tl.load(weights + request * (width + 1) + place).to(tl.float32)
    draft = request * width + place
    token = tl.load(token_ids + draft)
    drawn = tl.load(is_sampled + draft) != 0
    is_id_V = id_V < size
    logit_V = tl.load(logits + row * size + id_V, mask=is_id_V, other=float("-inf"))
    p_V = tl.exp(logit_V - base) / total
    num_drawn = tl.where(drawn, size, 0)
    q_V = tl.load(probs + draft * size + id_V, mask=id_V < num_drawn, other=0.0)
    q_V = tl.where(drawn, q_V, (id_V == token).to(tl.float32))
    left_V = weight * p_V - q_V
    return tl.where(left_V > 0.0, left_V, 0.0)  # nothing where q is NaN


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_SMALL)
def sum_left(
    logits,
    probs,
    token_ids,
    is_sampled,
    num_drafts,
    bases,
    sums,
    weights,
    left,  # float32 [B, N, Q]
    size,
    width,
    TILE: tl.constexpr,
):
    """Sum by splits what the children leave. Grid: [B, N, Q]."""
    request, place, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if place >= tl.load(num_drafts + request):
        return
    row = first_row_of(num_drafts, tl.program_id(0)) + place
    id_V = split * TILE + tl.arange(0, TILE)
    chain, of_rows = (probs, token_ids, is_sampled), (bases, sums, weights)
    left_V = _left(logits, chain, of_rows, request, row, place, id_V, size, width)
    target = (request * width + place) * tl.num_programs(2) + split
    tl.store(left + target, tl.sum(left_V))


@triton.jit(
    do_not_specialize=[*_NUMBERS, "recover", "sample"],
    do_not_specialize_on_alignment=[*_SMALL, "num_tokens", "seeds", "num_accepted", "left"],
)
def draw_last(
    logits,
    probs,
    token_ids,
    is_sampled,
    num_drafts,
    num_tokens,
    seeds,
    bases,
    sums,
    weights,
    num_accepted,
    left,  # float32 [B]
    best_values,  # float32 [B, Q]
    best_ids,  # int64
    size,
    width,
    recover,  # purposes
    sample,
    TILE: tl.constexpr,  # blocks of a split
):
    """The last token's best candidate of each split. Grid: [B, Q]."""
    request, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    accepted, number = tl.load(num_accepted + request), tl.load(num_drafts + request)
    row = first_row_of(num_drafts, tl.program_id(0)) + accepted
    block_W = (split * TILE + tl.arange(0, TILE)).to(tl.int64)
    position = (tl.load(num_tokens + request) + accepted) & MASK
    purpose = tl.where(accepted < number, recover, sample)
    words = philox(block_W, position, tl.zeros_like(block_W), purpose, tl.load(seeds + request))
    base, total = tl.load(bases + row), tl.load(sums + row)
    rest = tl.load(left + request)
    chain, of_rows = (probs, token_ids, is_sampled), (bases, sums, weights)
    value, token = float("-inf"), tl.full((), NO_ID, tl.int64)
    for part in tl.static_range(4):
        id_W = block_W * 4 + part
        if rest > 0.0:
            left_W = _left(logits, chain, of_rows, request, row, accepted, id_W, size, width)
            weight_W = left_W / rest
        else:
            logit_W = tl.load(logits + row * size + id_W, mask=id_W < size, other=float("-inf"))
            weight_W = tl.exp(logit_W - base) / total
        has_mass_W = weight_W > 0.0
        log_W = tl.where(has_mass_W, tl.log(tl.where(has_mass_W, weight_W, 1.0)), float("-inf"))
        key_W = log_W + gumbel_of_word(words[part])
        own_value, own_token = best(tl.where(id_W < size, key_W, float("-inf")), id_W)
        value, token = better(value, token, own_value, own_token)
    place = request * tl.num_programs(1) + split
    tl.store(best_values + place, value)
    tl.store(best_ids + place, token)
