"""Decide how much of each draft survives: pure functions of choices, distributions and noise.

They know no proposer, no random generator and no clock. `match_draft` is exact for any tree of
deterministic drafts; `rejection_sample` and `block_verify` are exact for chains that were sampled
from the probabilities they carry, provided that how far a chain goes was decided without looking
at the tokens past its end.

Dimension key: B requests, N most drafts of any request, N1 = N + 1 rows with the root,
V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from outdraft.spec.draft_batch import DraftBatch, ancestors_BN1N

# (log weights [B, V], number of accepted drafts [B]) -> ids [B] drawn from these weights
Draw = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What each request keeps. Everything stays on the device.

    Attributes:
        token_ids_BN1: int64; the emitted ids in order, padded with -1: the accepted drafts, then
            one more token (the recovered token after a rejection, the bonus token after none).
        num_emitted_B: int64, at least 1.
        rows_BN: int64; accepted draft rows in order, counted from 0 (the root is not among them),
            padded with -1. A chain's are 0, 1, 2, ...
    """

    token_ids_BN1: Tensor
    num_emitted_B: Tensor
    rows_BN: Tensor


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How far the chains were accepted.

    Attributes:
        num_accepted_B: int64.
        weight_B: the weight of the target in the residual after the last accepted draft: 1 for
            token-level rejection, the joint ratio for block verification.
    """

    num_accepted_B: Tensor
    weight_B: Tensor


def match_draft(choices_BN1: Tensor, drafts: DraftBatch) -> Verdict:
    """Walk every draft along the target's own choices.

    `choices_BN1` is what the target picked after each row, by argmax or by sampling. The path is
    what plain decoding would have produced, whoever drew the drafts and however they were cut.
    """
    if drafts.is_chain:
        hit_BN = (choices_BN1[:, :-1] == drafts.token_ids_BN) & drafts.is_draft_BN
        num_accepted_B = hit_BN.long().cumprod(1).sum(1)
        last_B1 = choices_BN1.gather(1, num_accepted_B[:, None])
        return chain_verdict(drafts, num_accepted_B, last_B1[:, 0])
    width = drafts.width
    is_on_path_BN = _matched_rows(choices_BN1, drafts)
    num_accepted_B = is_on_path_BN.sum(1)
    # A parent precedes its children, so the rows of a path in order are a path in order.
    place_N = torch.arange(width, device=drafts.device)
    rows_BN = torch.where(is_on_path_BN, place_N, width).sort(1).values
    is_row_BN = rows_BN < width
    path_BN1 = pad(torch.where(is_row_BN, rows_BN + 1, 0), (1, 0))
    is_emitted_BN1 = pad(is_row_BN, (1, 0), value=True)
    return Verdict(
        token_ids_BN1=torch.where(is_emitted_BN1, choices_BN1.gather(1, path_BN1), -1),
        num_emitted_B=num_accepted_B + 1,
        rows_BN=torch.where(is_row_BN, rows_BN, -1),
    )


def _matched_rows(choices_BN1: Tensor, drafts: DraftBatch) -> Tensor:
    """bool [B, N]: the draft and all its ancestors are what the target chose at their parents."""
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 0)
    hit_BN = (choices_BN1.gather(1, parents_BN) == drafts.token_ids_BN) & drafts.is_draft_BN
    # Of siblings that hold the same token the first one is taken.
    same_parent_BNN = parents_BN[:, :, None] == parents_BN[:, None, :]
    is_repeated_BN = (same_parent_BNN & hit_BN[:, None, :]).tril(-1).any(2)
    hit_BN = hit_BN & ~is_repeated_BN
    return (hit_BN[:, None, :] | ~ancestors_BN1N(drafts)[:, 1:]).all(2)


def chain_verdict(drafts: DraftBatch, num_accepted_B: Tensor, last_B: Tensor) -> Verdict:
    """The first drafts of each chain, then one more token."""
    place_N1 = torch.arange(drafts.width + 1, device=drafts.device)
    accepted_B1 = num_accepted_B[:, None]
    token_ids_BN1 = torch.where(place_N1 < accepted_B1, pad(drafts.token_ids_BN, (0, 1)), -1)
    place_N = place_N1[:-1]
    return Verdict(
        token_ids_BN1=token_ids_BN1.scatter(1, accepted_B1, last_B[:, None]),
        num_emitted_B=num_accepted_B + 1,
        rows_BN=torch.where(place_N < accepted_B1, place_N, -1),
    )


def accept_tokens(target_BN1V: Tensor, drafts: DraftBatch, coins_BN: Tensor) -> Acceptance:
    """Accept draft x while coin < p(x) / q(x); Leviathan et al. 2023, algorithm 1."""
    p_BN, q_BN = _drafted(target_BN1V, drafts)
    is_accepted_BN = (coins_BN * q_BN < p_BN) & drafts.is_draft_BN
    num_accepted_B = is_accepted_BN.long().cumprod(1).sum(1)
    return Acceptance(num_accepted_B, torch.ones_like(num_accepted_B, dtype=target_BN1V.dtype))


def accept_block(target_BN1V: Tensor, drafts: DraftBatch, coins_BN: Tensor) -> Acceptance:
    """Accept up to the last draft whose coin is below its h; Sun et al. 2025, algorithm 2.

    All coins count: a failed one does not end the scan.
    """
    assert drafts.probs_BNV is not None
    p_BN, q_BN = _drafted(target_BN1V, drafts)
    tiny = torch.finfo(torch.float64).tiny
    ratio_BN = p_BN.double().log() - q_BN.double().clamp(min=tiny).log()
    ratio_BN = torch.where(drafts.is_draft_BN, ratio_BN, 0.0)
    # min(1, last * ratio) at every place: a walk that is pushed back whenever it exceeds 0.
    walk_BN = ratio_BN.cumsum(1)
    log_weight_BN = walk_BN - walk_BN.cummax(1).values.clamp(min=0.0)
    weight_BN = log_weight_BN.exp().to(target_BN1V.dtype)

    weight_BM = weight_BN[:, :-1]
    left_BMV = weight_BM[:, :, None] * target_BN1V[:, 1:-1] - drafts.probs_BNV[:, 1:]
    left_BM = left_BMV.clamp_(min=0).sum(2)
    whole_BM = left_BM + 1 - weight_BM
    inner_BM = torch.where(whole_BM > 0, left_BM / whole_BM.clamp(min=tiny), 0.0)
    place_N = torch.arange(drafts.width, device=drafts.device)
    is_last_BN = place_N == drafts.num_drafts_B[:, None] - 1
    threshold_BN = torch.where(is_last_BN, weight_BN, pad(inner_BM, (0, 1)))
    is_accepted_BN = (coins_BN < threshold_BN) & drafts.is_draft_BN

    num_accepted_B = torch.where(is_accepted_BN, place_N + 1, 0).amax(1)
    weight_BN1 = pad(weight_BN, (1, 0), value=1.0)
    return Acceptance(num_accepted_B, weight_BN1.gather(1, num_accepted_B[:, None])[:, 0])


def last_weights(target_BN1V: Tensor, drafts: DraftBatch, acceptance: Acceptance) -> Tensor:
    """[B, V] weights, not normalised, of the token after the accepted ones.

    The residual max(weight * p - q, 0) after a rejection; p itself after none, and where the
    residual is empty (p == q up to rounding).
    """
    assert drafts.probs_BNV is not None
    requests_B = torch.arange(drafts.num_requests, device=drafts.device)
    at_B = acceptance.num_accepted_B
    p_BV = target_BN1V[requests_B, at_B]
    q_BV = drafts.probs_BNV[requests_B, at_B.clamp(max=drafts.width - 1)]
    residual_BV = (acceptance.weight_B[:, None] * p_BV - q_BV).clamp_(min=0)
    is_bonus_B1 = (at_B == drafts.num_drafts_B)[:, None]
    is_empty_B1 = residual_BV.amax(1, keepdim=True) <= 0
    return torch.where(is_bonus_B1 | is_empty_B1, p_BV, residual_BV)


def rejection_sample(
    target_BN1V: Tensor, drafts: DraftBatch, coins_BN: Tensor, draw: Draw
) -> Verdict:
    """Token-level rejection sampling of padded chains, N at least 1.

    Args:
        target_BN1V: processed target probabilities of each row; padding is ignored.
        drafts: chains with their probabilities.
        coins_BN: uniform noise in (0, 1), independent of everything else.
        draw: draws the token after the accepted ones, with noise independent of everything else.
    """
    return _finish(target_BN1V, drafts, accept_tokens(target_BN1V, drafts, coins_BN), draw)


def block_verify(target_BN1V: Tensor, drafts: DraftBatch, coins_BN: Tensor, draw: Draw) -> Verdict:
    """Block verification of padded chains, N at least 1; arguments as for `rejection_sample`.

    Accepts at least as many drafts in expectation, from the same distribution.
    """
    return _finish(target_BN1V, drafts, accept_block(target_BN1V, drafts, coins_BN), draw)


def _finish(target_BN1V: Tensor, drafts: DraftBatch, acceptance: Acceptance, draw: Draw) -> Verdict:
    weights_BV = last_weights(target_BN1V, drafts, acceptance)
    last_B = draw(weights_BV.log(), acceptance.num_accepted_B)
    return chain_verdict(drafts, acceptance.num_accepted_B, last_B)


def _drafted(target_BN1V: Tensor, drafts: DraftBatch) -> tuple[Tensor, Tensor]:
    """[B, N] each: target's and proposer's probability of every drafted token."""
    assert drafts.probs_BNV is not None
    ids_BN1 = drafts.token_ids_BN.clamp(min=0)[:, :, None]
    p_BN = target_BN1V[:, :-1].gather(2, ids_BN1)[:, :, 0]
    return p_BN, drafts.probs_BNV.gather(2, ids_BN1)[:, :, 0]
