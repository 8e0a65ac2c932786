"""Verification of trees with sampled drafts: a pure function, as those of `verify`.

Traversal verification (Weng et al., NeurIPS 2025, arXiv 2505.12398) is block verification of trees.
Every row has a weight w, the probability that its subtree is accepted, and a rest, the part of the
target's p that its children have not used yet. The root's weight is 1, and every rest begins as p.
Children are tested in the order of their rows. A child x that was drawn from q has the weight
min(1, w * rest(x) / q(x)). If the child's subtree is refused, its parent continues with

    left = max(w * rest - q, 0),   rest = left / sum(left),   w = sum(left) / (sum(left) + 1 - w)

and the next child is tested. After the last child the path ends at the parent with probability w,
with a token of the rest; otherwise the parent's subtree is refused too. A deterministic child
counts as drawn from a distribution with one token.

Whatever is drawn below a row, its subtree is accepted with exactly the row's weight. So a tree may
grow by any rule that decides whether a row exists before the row's own token is drawn, with noise
of its own. The rule may look at everything that was drawn earlier, in other branches too. Each
child's q may depend on the siblings before it: drawing without replacement excludes them.

Dimension key: B requests, N most drafts of any request, N1 = N + 1 rows with the root, R flat
rows, V vocabulary.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from outdraft.verification.draft_batch import DraftBatch, ancestors_BN1N, row_start_B
from outdraft.verification.verify import (
    Draw,
    Verdict,
    drawn_from,
    last_row_B,
    path_of_firsts,
    residual,
    tree_verdict,
)


def verify_tree(logits_RV: Tensor, drafts: DraftBatch, coins_BN: Tensor, draw: Draw) -> Verdict:
    """Accept a path of each padded tree, N at least 1.

    Weights do not depend on coins, so those of all rows are computed first. Then the rows are
    tested, children before their parent: the path ends at the first coin below its row's weight.

    Args:
        logits_RV: processed logits of the target, flat rows.
        drafts: trees; the probabilities of a sampled draft are those that it was drawn from, given
            its siblings of smaller rows.
        coins_BN: uniform noise in (0, 1), one per draft, independent of everything else.
        draw: draws the last token, with noise independent of everything else.
    """
    weight_BN, rest_RV = _all_refused(logits_RV, drafts)
    stops_BN = (coins_BN < weight_BN) & drafts.is_draft_BN
    stops_below_BN = (ancestors_BN1N(drafts)[:, 1:] & stops_BN[:, :, None]).any(1)
    is_on_path_BN = path_of_firsts(stops_below_BN, drafts)

    last_B = last_row_B(is_on_path_BN)
    at_B = row_start_B(drafts) + last_B
    rest_BV = rest_RV[at_B]
    has_rest_B1 = rest_BV.amax(1, keepdim=True) > 0  # nothing is left where p == q up to rounding
    log_weights_BV = torch.where(has_rest_B1, rest_BV.log(), logits_RV[at_B])
    is_refused_B = ((drafts.parents_BN == last_B[:, None]) & drafts.is_draft_BN).any(1)
    token_B = draw(log_weights_BV, is_on_path_BN.sum(1), is_refused_B)
    return tree_verdict(drafts, is_on_path_BN, token_B)


def _all_refused(logits_RV: Tensor, drafts: DraftBatch) -> tuple[Tensor, Tensor]:
    """Each draft's weight [B, N] and each row's rest [R, V], if all of its children are refused."""
    requests_B = torch.arange(drafts.num_requests, device=drafts.device)
    start_B, is_draft_BN = row_start_B(drafts), drafts.is_draft_BN
    rest_RV = logits_RV.softmax(1)
    weight_BN1 = torch.zeros_like(pad(is_draft_BN, (1, 0)), dtype=torch.float64)
    weight_BN1[:, 0] = 1
    for draft in range(drafts.width):
        is_draft_B, ids_B = is_draft_BN[:, draft], drafts.token_ids_BN[:, draft].clamp(min=0)
        parent_B = torch.where(is_draft_B, drafts.parents_BN[:, draft], 0)
        at_B = start_B + parent_B
        weight_B, rest_BV = weight_BN1[requests_B, parent_B], rest_RV[at_B]
        q_BV = drawn_from(drafts, torch.full_like(parent_B, draft))
        p_B, q_B = (of_BV[requests_B, ids_B].double() for of_BV in (rest_BV, q_BV))
        own_B = (weight_B * p_B / q_B.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1)
        weight_BN1[:, draft + 1] = torch.where(is_draft_B, own_B, 0)

        left_BV = residual(rest_BV, q_BV, weight_B.to(rest_BV.dtype))
        left_B = left_BV.sum(1, dtype=torch.float64)
        has_left_B = is_draft_B & (left_B > 0)
        refused_B = torch.where(has_left_B, left_B / (left_B + (1 - weight_B)), 0)
        weight_BN1[requests_B, parent_B] = torch.where(is_draft_B, refused_B, weight_B)
        left_BV = torch.where(has_left_B[:, None], left_BV / left_B[:, None], 0)
        rest_RV[at_B] = torch.where(is_draft_B[:, None], left_BV.to(rest_BV.dtype), rest_BV)
    return weight_BN1[:, 1:], rest_RV
