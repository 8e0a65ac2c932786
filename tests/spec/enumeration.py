"""What a rule emits, by enumeration: no sampling noise, only arithmetic.

Decisions come from the production rules. A rule compares coins with thresholds; these are found
by bisection on the rule itself, or proposed and then tried on it, and every combination of coins
below and above them, and of draws, is judged by the rule. What it emits is decoded on with the
target.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import torch

from outdraft.core.draft import tree_depths
from outdraft.spec.draft_batch import row_start_B
from outdraft.spec.verify import last_weights
from tests.reference.drafted_trees import as_batch, target_rows
from tests.reference.verification import all_sequences, completed, joint, total_variation

V = 3
LONGEST = 4  # tokens that a model of `random_model` has contexts for
KINDS = ("plain", "equal", "tied", "zeros", "disjoint", "one_hot_q", "one_hot_p")
ALMOST_ONE = 1 - 2.0**-53


def random_pair(rng, kind):
    """Target and proposer distributions of one context."""
    p, q = rng.dirichlet(np.ones(V)), rng.dirichlet(np.ones(V))
    if kind == "equal":
        q = p.copy()
    if kind == "tied":
        p, q = np.full(V, 1 / V), np.array([0.5, 0.25, 0.25])
    if kind == "zeros":
        p[rng.integers(V)], q[rng.integers(V)] = 0, 0
    if kind == "disjoint":
        alone = rng.integers(V)
        p[alone], q = 0, np.eye(V)[alone]
    if kind == "one_hot_q":
        q = np.eye(V)[rng.integers(V)]
    if kind == "one_hot_p":
        p = np.eye(V)[rng.integers(V)]
    return p / p.sum(), q / q.sum()


def random_model(seed, kinds=KINDS):
    """(target, proposer): functions of a prefix, with mixed kinds of contexts."""
    rng = np.random.default_rng(seed)
    pairs = {
        prefix: random_pair(rng, rng.choice(kinds))
        for length in range(LONGEST + 1)
        for prefix in all_sequences(V, length)
    }
    return (lambda prefix: pairs[prefix][0]), (lambda prefix: pairs[prefix][1])


def thresholds(accept, p_BN1V, drafts):
    """float64 [B, N]: below which value of its own coin a draft is accepted."""
    low = torch.zeros(drafts.token_ids_BN.shape, dtype=torch.float64)
    high = torch.ones_like(low)
    for _ in range(60):
        middle = (low + high) / 2
        is_accepted = torch.empty_like(low, dtype=torch.bool)
        for at in range(drafts.width):
            coins_BN = torch.ones_like(low)
            coins_BN[:, :at] = 0.0
            coins_BN[:, at] = middle[:, at]
            is_accepted[:, at] = accept(p_BN1V, drafts, coins_BN).num_accepted_B > at
        low, high = torch.where(is_accepted, middle, low), torch.where(is_accepted, high, middle)
    return torch.where(high > 1 - 1e-15, 1.0, low)


def chains_emit(drafts, p_BN1V, weights, accept, last=last_weights):
    """{sequence: probability} of what one step emits, of chains with these weights."""
    limit_BN = thresholds(accept, p_BN1V, drafts)
    emitted = defaultdict(float)
    for is_below in itertools.product((True, False), repeat=drafts.width):
        below_N = torch.tensor(is_below)
        coins_BN = torch.where(below_N, limit_BN / 2, (1 + limit_BN) / 2)
        share_B = torch.where(below_N, limit_BN, 1 - limit_BN).prod(1)
        acceptance = accept(p_BN1V, drafts, coins_BN)
        last_BV = last(p_BN1V, drafts, acceptance)
        last_BV = last_BV / last_BV.sum(1, keepdim=True)
        for b, weight in enumerate(weights):
            head = tuple(drafts.token_ids_BN[b, : acceptance.num_accepted_B[b]].tolist())
            for v in range(V):
                share = weight * share_B[b].item() * last_BV[b, v].item()
                if share > 0:
                    emitted[(*head, v)] += share
    return emitted


@dataclass
class Script:
    """Draws what it is told, and keeps what it would have been drawn from."""

    ids_BA: torch.Tensor

    def __post_init__(self):
        self.log_weights = []

    def __call__(self, log_weights_BV, depth_B, _):
        depth = int(depth_B[0])
        self.log_weights.append(log_weights_BV)
        return self.ids_BA[:, depth] if depth < self.ids_BA.shape[1] else self.ids_BA[:, 0]

    def shares_B(self):
        """The probability of these draws."""
        chosen = [
            x_BV.softmax(1).gather(1, self.ids_BA[:, depth : depth + 1])[:, 0]
            for depth, x_BV in enumerate(self.log_weights[: self.ids_BA.shape[1]])
        ]
        return torch.stack(chosen, 1).prod(1)


def repeated(drafts, logits_RV, index_B):
    """The drafts `index_B` with their flat rows."""
    start_B, rows_B = row_start_B(drafts), drafts.num_drafts_B + 1
    rows = [torch.arange(int(start_B[b]), int(start_B[b] + rows_B[b])) for b in range(len(rows_B))]
    chosen = replace(
        drafts,
        token_ids_BN=drafts.token_ids_BN[index_B],
        parents_BN=drafts.parents_BN[index_B],
        num_drafts_B=drafts.num_drafts_B[index_B],
        probs_BNV=drafts.probs_BNV[index_B],
        is_sampled_BN=drafts.is_sampled_BN[index_B],
    )
    return chosen, logits_RV[torch.cat([rows[b] for b in index_B.tolist()])]


def limits(rule, trees, drafts, logits_RV):
    """float64 [B, N1]: below which coin the sampled child of a row is accepted; 0.5: there is none.

    That is p / q; the rule, led to the row by coins and draws, must change its answer just there.
    """
    limit_BN1 = torch.full((len(trees), drafts.width + 1), 0.5, dtype=torch.float64)
    cases = [
        (b, at)
        for b, tree in enumerate(trees)
        for at in range(len(tree))
        if drafts.is_sampled_BN[b, at]
    ]
    if not cases:
        return limit_BN1
    trees_C, at_C = (torch.tensor(one) for one in zip(*cases, strict=True))
    coins_CN = torch.ones((len(cases), drafts.width), dtype=torch.float64)
    ids_CN = torch.zeros((len(cases), drafts.width), dtype=torch.int64)
    depth_C = torch.zeros(len(cases), dtype=torch.int64)
    paths: list[list[int]] = []
    for c, (b, at) in enumerate(cases):
        row, path = trees[b].parents[at], []
        while row:
            path.insert(0, row - 1)
            row = trees[b].parents[row - 1]
        depth_C[c] = len(path)
        paths.append(path)
        for depth, draft in enumerate(path):
            ids_CN[c, depth] = trees[b].token_ids[draft]
            coins_CN[c, depth] = 0.0 if drafts.is_sampled_BN[b, draft] else ALMOST_ONE
    batch, rows_RV = repeated(drafts, logits_RV, trees_C)
    parents_C = drafts.parents_BN[trees_C, at_C]
    ids_C = drafts.token_ids_BN[trees_C, at_C]
    p_CV = logits_RV[row_start_B(drafts)[trees_C] + parents_C].exp()
    p_C = p_CV.gather(1, ids_C[:, None])[:, 0]
    limit_C = (p_C / drafts.probs_BNV[trees_C, at_C, ids_C]).clamp(max=1)
    for step, answer in ((-1e-13, True), (1e-13, False)):
        coins_CN.scatter_(1, depth_C[:, None], (limit_C + step)[:, None])
        verdict = rule(rows_RV, batch, coins_CN, Script(ids_CN))
        taken_C = verdict.rows_BN.gather(1, depth_C[:, None])[:, 0] == at_C
        came_C = torch.tensor(
            [
                path == rows[: len(path)]
                for path, rows in zip(paths, verdict.rows_BN.tolist(), strict=True)
            ]
        )
        may_C = (limit_C > 0) if answer else (limit_C < 1)
        assert (taken_C == answer)[came_C & may_C].all(), "the rule has another threshold"
    limit_BN1[trees_C, parents_C] = limit_C
    return limit_BN1


def trees_emit(rule, trees, target, drafts=None):
    """{sequence: probability} of what one step emits."""
    drafts = as_batch(trees, V) if drafts is None else drafts
    logits_RV = target_rows(trees, target)
    limit_BN1 = limits(rule, trees, drafts, logits_RV)
    levels = max(max(tree_depths(tree.parents), default=0) for tree in trees)
    scripts = [
        (*coins, *ids)
        for coins in itertools.product((0.0, ALMOST_ONE), repeat=levels)
        for ids in all_sequences(V, levels + 1)
    ]
    tree_B = torch.arange(len(trees)).repeat_interleave(len(scripts))
    script_BA = torch.tensor(scripts, dtype=torch.float64).repeat(len(trees), 1)
    coins_BN = torch.ones((len(tree_B), drafts.width), dtype=torch.float64)
    coins_BN[:, :levels] = script_BA[:, :levels]
    script = Script(script_BA[:, levels:].long())
    batch, rows_RV = repeated(drafts, logits_RV, tree_B)
    verdict = rule(rows_RV, batch, coins_BN, script)

    share_B = script.shares_B() * torch.tensor([tree.weight for tree in trees])[tree_B]
    row_B = torch.zeros_like(tree_B)
    for depth in range(levels):
        limit_B = torch.where(row_B >= 0, limit_BN1[tree_B, row_B.clamp(min=0)], 0.5)
        share_B = share_B * torch.where(script_BA[:, depth] == 0, limit_B, 1 - limit_B)
        taken_B = verdict.rows_BN[:, depth]
        row_B = torch.where(taken_B >= 0, taken_B + 1, -1)
    emitted = defaultdict(float)
    live = (share_B > 0).nonzero()[:, 0]
    for ids, count, share in zip(
        verdict.token_ids_BN1[live].tolist(),
        verdict.num_emitted_B[live].tolist(),
        share_B[live].tolist(),
        strict=True,
    ):
        emitted[tuple(ids[:count])] += share
    return emitted


def bias(emitted, target, length=LONGEST):
    """Total variation between the first tokens and the target's own."""
    return total_variation(completed(emitted, target, length), joint(target, length))


def mean_tokens(emitted):
    return sum(len(sequence) * weight for sequence, weight in emitted.items())
