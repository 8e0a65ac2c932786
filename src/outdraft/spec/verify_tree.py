"""Verification of trees with sampled drafts: a pure function, as those of `verify`.

Dimension key: B requests, N most drafts of any request, N1 = N + 1 rows with the root, R flat
rows, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from outdraft.spec.draft_batch import DraftBatch, row_start_B
from outdraft.spec.verify import Draw, Verdict, residual


def verify_tree(logits_RV: Tensor, drafts: DraftBatch, coins_BN: Tensor, draw: Draw) -> Verdict:
    """Walk down padded trees, N at least 1; "top-(n-1)+1" of Hu et al. 2025 (arXiv 2502.18779).

    At a row with a sampled child x: accept x while coin < p(x) / q(x); else draw y from
    max(p - q, 0), where nothing of x is left, and go on at the deterministic child that holds y.
    At a row without one: draw y from p. A y that no child holds is the last token. One draw
    decides all deterministic children at once: for trees drafted this way no rule accepts more.

    Exact if x was drawn from q, and if whether a row is verified never depends on that row's own
    token (unless it is deterministic) or on its descendants; what stands in other branches, and
    the row's own prefix, may decide it. One loop over the depth, all requests at once.

    Args:
        logits_RV: processed logits of the target, flat rows.
        drafts: trees; of the children of a row at most one is sampled. q is normalised over what
            it could have been: without its deterministic siblings.
        coins_BN: uniform noise in (0, 1), one per depth, independent of everything else.
        draw: draws y, with noise independent of everything else, for every depth.
    """
    start_B = row_start_B(drafts)
    row_B = torch.zeros_like(start_B)
    walks_B = torch.ones_like(start_B, dtype=torch.bool)
    tokens: list[Tensor] = []
    rows: list[Tensor] = []
    # The deepest row has no children to toss a coin for.
    for depth, coin_B in enumerate(pad(coins_BN, (0, 1)).unbind(1)):
        depth_B = torch.full_like(row_B, depth)
        token_B, child_B = _step(logits_RV[start_B + row_B], drafts, row_B, coin_B, depth_B, draw)
        tokens.append(torch.where(walks_B, token_B, -1))
        walks_B = walks_B & (child_B >= 0)
        rows.append(torch.where(walks_B, child_B, -1))
        row_B = torch.where(walks_B, child_B + 1, row_B)
    token_ids_BN1 = torch.stack(tokens, 1)
    return Verdict(
        token_ids_BN1=token_ids_BN1,
        num_emitted_B=(token_ids_BN1 >= 0).sum(1),
        rows_BN=torch.stack(rows[:-1], 1),
    )


def _step(
    logits_BV: Tensor,
    drafts: DraftBatch,
    row_B: Tensor,
    coin_B: Tensor,
    depth_B: Tensor,
    draw: Draw,
) -> tuple[Tensor, Tensor]:
    """The token behind each row, and the draft that holds it, -1 if none does."""
    assert drafts.probs_BNV is not None
    requests_B = torch.arange(drafts.num_requests, device=drafts.device)
    is_child_BN = (drafts.parents_BN == row_B[:, None]) & drafts.is_draft_BN
    has_x_B, x_B = _first(is_child_BN & drafts.is_sampled_BN)
    x_id_B = drafts.token_ids_BN[requests_B, x_B]
    p_BV, q_BV = logits_BV.softmax(1), drafts.probs_BNV[requests_B, x_B]
    p_B, q_B = (of_BV.gather(1, x_id_B.clamp(min=0)[:, None])[:, 0] for of_BV in (p_BV, q_BV))
    takes_x_B = has_x_B & (coin_B * q_B < p_B)

    left_BV = residual(p_BV, q_BV, torch.ones_like(p_B))
    has_left_B = has_x_B & (left_BV.amax(1) > 0)  # nothing is left where p == q up to rounding
    y_B = draw(torch.where(has_left_B[:, None], left_BV.log(), logits_BV), depth_B, has_x_B)
    is_fixed_BN = is_child_BN & ~drafts.is_sampled_BN
    has_child_B, child_B = _first(is_fixed_BN & (drafts.token_ids_BN == y_B[:, None]))
    child_B = torch.where(takes_x_B, x_B, torch.where(has_child_B, child_B, -1))
    return torch.where(takes_x_B, x_id_B, y_B), child_B


def _first(is_it_BN: Tensor) -> tuple[Tensor, Tensor]:
    """([B], [B]): is there one, and the place of the first; 0 if there is none."""
    return is_it_BN.any(1), is_it_BN.int().argmax(1)
