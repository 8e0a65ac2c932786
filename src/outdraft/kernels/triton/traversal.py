# pyright: basic, reportArgumentType=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportInvalidTypeForm=false, reportOperatorIssue=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
# Triton infers the types of kernels and specialises on them. A launch takes more than their
# parameters.
"""Verification of drawn chains on a GPU: torch/verification.py, `traverse`, in six launches.

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

from outdraft.kernels.data.drafts import DraftBatch, Rule, Verdict
from outdraft.kernels.data.noise import Purpose
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.torch import verification
from outdraft.kernels.triton import noise
from outdraft.kernels.triton.noise import MASK, gumbel_of_word, philox, unit_of_word
from outdraft.kernels.triton.vocabulary import (
    NO_ID,
    best,
    best_of_splits,
    better,
    first_row_of,
    softmax_of_row,
    softmax_of_split,
)

_TILE = 1024  # ids
_TINY = tl.constexpr(2.2250738585072014e-308)
# One kernel serves drafts of all widths, and small tensors wherever they begin: each that is
# compiled on the way takes longer than hundreds of steps.
_NUMBERS = ["size", "width"]
_SMALL = ["token_ids", "is_sampled", "num_drafts", "bases", "sums", "weights"]
_POINTERS = ["weights", "left", "num_drafts", "num_tokens", "seeds", "to_num_accepted", "to_left"]
_OF_VERDICTS = ["token_ids", "num_accepted", "to_token_ids", "to_num_emitted", "to_rows"]


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
    judged = traverse_chains(processed_RV, drafts, sampling.seeds_B, num_tokens_B)
    step = verification.VerificationStep(processed_RV, drafts, sampling, num_tokens_B, noise)
    return step.beside_matched(judged)


def traverse_chains(
    logits_RV: Tensor, drafts: DraftBatch, seeds_B: Tensor, num_tokens_B: Tensor
) -> Verdict:
    """Traversal verification of chains; the verdicts of `verification.traverse`.

    Args:
        logits_RV: float32, processed.
        drafts: one request at least, and one draft of it.
        seeds_B: int64, the requests' noise.
    """
    assert drafts.probs_BNV is not None
    assert drafts.is_sampled_BN is not None
    size, number, width = logits_RV.shape[1], drafts.num_requests, drafts.width
    num_splits, device = triton.cdiv(size, _TILE), logits_RV.device
    in_splits = {"NUM_SPLITS": num_splits, "SPLITS": triton.next_power_of_2(num_splits)}
    logits_RV, ids_BN = logits_RV.contiguous(), drafts.token_ids_BN.contiguous()
    is_sampled_BN = drafts.is_sampled_BN.contiguous().view(torch.uint8)
    probs_BNV, num_drafts_B = drafts.probs_BNV.contiguous(), drafts.num_drafts_B.contiguous()
    chains = probs_BNV, ids_BN, is_sampled_BN, num_drafts_B
    tokens = num_tokens_B.contiguous(), seeds_B.contiguous()
    of_rows, ends = _end_paths(logits_RV, chains, tokens, in_splits)
    values_BQ = torch.empty(number, num_splits, device=device)
    best_BQ = torch.empty_like(values_BQ, dtype=torch.int64)
    draw_last[(number, num_splits)](
        logits_RV,
        *(*chains, *tokens, *of_rows, *ends, values_BQ, best_BQ, size, width),
        int(Purpose.RECOVER),
        int(Purpose.SAMPLE),
        TILE=_TILE // 4,
        enable_fp_fusion=False,
    )
    verdict = Verdict(
        ids_BN.new_empty(number, width + 1), ids_BN.new_empty(number), torch.empty_like(ids_BN)
    )
    write_verdicts[(number,)](
        *(ids_BN, ends[0], values_BQ, best_BQ),
        *(verdict.token_ids_BN1, verdict.num_emitted_B, verdict.rows_BN, width),
        WIDTH=triton.next_power_of_2(width + 1),
        **in_splits,
    )
    return verdict


def _end_paths(
    logits_RV: Tensor,
    chains: tuple[Tensor, ...],
    tokens: tuple[Tensor, Tensor],
    in_splits: dict[str, int],
) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Bases, sums and weights of all rows; the number of accepted drafts of each request, and what
    their last row leaves."""
    (num_rows, size), (number, width) = logits_RV.shape, chains[1].shape
    num_splits, device = in_splits["NUM_SPLITS"], logits_RV.device
    tops_RQ, totals_RQ = (torch.empty(num_rows, num_splits, device=device) for _ in range(2))
    bases_R, sums_R = (torch.empty(num_rows, device=device) for _ in range(2))
    weights_BN1 = torch.empty(number, width + 1, dtype=torch.float64, device=device)
    of_rows = bases_R, sums_R, weights_BN1
    left_BNQ = torch.empty(number, width, num_splits, device=device)
    ends = torch.empty_like(tokens[0]), torch.empty(number, device=device)
    split_softmax[(num_rows, num_splits)](logits_RV, tops_RQ, totals_RQ, size, TILE=_TILE)
    weigh_rows[(number,)](
        logits_RV, tops_RQ, totals_RQ, *chains, *of_rows, size, width, **in_splits
    )
    # What is summed here is drawn from below.
    sum_left[(number, width, num_splits)](
        *(logits_RV, *chains, *of_rows, left_BNQ, size, width), TILE=_TILE, enable_fp_fusion=False
    )
    stop_paths[(number,)](
        *(weights_BN1, left_BNQ, chains[3], *tokens, *ends, width, int(Purpose.ACCEPT)), **in_splits
    )
    return of_rows, ends


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
    softmax_of_split(logits, row, split, size, tops, totals, TILE)


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


@triton.jit(do_not_specialize=["width", "purpose"], do_not_specialize_on_alignment=_POINTERS)
def stop_paths(
    weights,
    left,
    num_drafts,
    num_tokens,
    seeds,
    to_num_accepted,  # int64 [B]
    to_left,  # float32 [B]: the sum that the last token is drawn from; 0: from the row's p
    width,
    purpose,
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Rows are tested from the last one on: the path ends at the first coin below its row's weight.
    Grid: [B]."""
    request = tl.program_id(0).to(tl.int64)
    number = tl.load(num_drafts + request).to(tl.int32)
    length = tl.load(num_tokens + request)
    seed = tl.load(seeds + request)
    zero = tl.full((), 0, tl.int64)
    place_Q = tl.arange(0, SPLITS)
    accepted = tl.full((), 0, tl.int32)
    rest = tl.full((), 0.0, tl.float64)
    for place in range(number + 1):
        weight = tl.load(weights + request * (width + 1) + place)
        num_parts = tl.where(place < number, NUM_SPLITS, 0)
        source = left + (request * width + place) * NUM_SPLITS
        parts_Q = tl.load(source + place_Q, mask=place_Q < num_parts, other=0.0)
        total = tl.sum(parts_Q.to(tl.float64))
        bottom = total + (1.0 - weight)
        refused = tl.where(total > 0.0, total / tl.where(bottom > 0.0, bottom, 1.0), 0.0)
        weight = tl.where(place < number, refused, weight)
        word, _, _, _ = philox(zero, (length + place - 1) & MASK, length & MASK, purpose, seed)
        stops = (place == 0) | (unit_of_word(word).to(tl.float64) < weight)
        accepted = tl.where(stops, place, accepted)
        rest = tl.where(stops, total, rest)
    tl.store(to_num_accepted + request, accepted.to(tl.int64))
    tl.store(to_left + request, rest.to(tl.float32))


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


@triton.jit(do_not_specialize=["width"], do_not_specialize_on_alignment=_OF_VERDICTS)
def write_verdicts(
    token_ids,
    num_accepted,
    best_values,
    best_ids,
    to_token_ids,  # int64 [B, N + 1]
    to_num_emitted,
    to_rows,  # int64 [B, N]
    width,
    WIDTH: tl.constexpr,  # at least width + 1
    NUM_SPLITS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """The accepted drafts and the last token. Grid: [B]."""
    request = tl.program_id(0).to(tl.int64)
    token = best_of_splits(best_values, best_ids, request, NUM_SPLITS, SPLITS)
    accepted = tl.load(num_accepted + request)
    place_N = tl.arange(0, WIDTH)
    draft_N = tl.load(token_ids + request * width + place_N, mask=place_N < width, other=-1)
    emitted_N = tl.where(place_N < accepted, draft_N, tl.where(place_N == accepted, token, -1))
    tl.store(to_token_ids + request * (width + 1) + place_N, emitted_N, mask=place_N <= width)
    rows_N = tl.where(place_N < accepted, place_N, -1)
    tl.store(to_rows + request * width + place_N, rows_N, mask=place_N < width)
    tl.store(to_num_emitted + request, accepted + 1)
