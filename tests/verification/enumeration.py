"""What a rule emits, by enumeration: no sampling noise, only arithmetic.

Decisions come from the production rules. A rule compares coins with thresholds; these are found
by bisection on the rule itself, and every combination of coins below and above them, and of draws,
is judged by the rule. What it emits is decoded on with the target.
"""

import itertools
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import torch

from outdraft.kernels.data.drafts import row_start_B
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


def thresholds(rule, logits_RV, drafts):
    """float64 [B, N]: below which value of its own coin a draft of a chain is accepted."""
    low = torch.zeros(drafts.token_ids_BN.shape, dtype=torch.float64)
    high = torch.ones_like(low)
    first_B = torch.zeros_like(drafts.num_drafts_B)
    for _ in range(60):
        middle = (low + high) / 2
        is_accepted = torch.empty_like(low, dtype=torch.bool)
        for at in range(drafts.width):
            coins_BN = torch.ones_like(low)
            coins_BN[:, :at] = 0.0
            coins_BN[:, at] = middle[:, at]
            verdict = rule(logits_RV, drafts, coins_BN, Script(first_B))
            is_accepted[:, at] = verdict.num_emitted_B > at + 1
        low, high = torch.where(is_accepted, middle, low), torch.where(is_accepted, high, middle)
    return torch.where(high > 1 - 1e-15, 1.0, low)


def each_chain_emits(rule, drafts, logits_RV):
    """By chain: {sequence: probability} of what one step emits."""
    limit_BN = thresholds(rule, logits_RV, drafts)
    emitted = [defaultdict(float) for _ in range(drafts.num_requests)]
    for is_below in itertools.product((True, False), repeat=drafts.width):
        below_N = torch.tensor(is_below)
        coins_BN = torch.where(below_N, limit_BN / 2, (1 + limit_BN) / 2)
        share_B = torch.where(below_N, limit_BN, 1 - limit_BN).prod(1)
        script = Script(torch.zeros_like(drafts.num_drafts_B))
        verdict = rule(logits_RV, drafts, coins_BN, script)
        for b, law in enumerate(emitted):
            head = tuple(verdict.token_ids_BN1[b, : verdict.num_emitted_B[b] - 1].tolist())
            for v in range(V):
                share = share_B[b].item() * script.weights_BV[b, v].item()
                if share > 0:
                    law[(*head, v)] += share
    return emitted


def chains_emit(rule, drafts, logits_RV, weights):
    """{sequence: probability} of what one step emits, of chains with these weights."""
    emitted = defaultdict(float)
    for law, weight in zip(each_chain_emits(rule, drafts, logits_RV), weights, strict=True):
        for sequence, share in law.items():
            if weight * share > 0:
                emitted[sequence] += weight * share
    return emitted


@dataclass
class Script:
    """Draws what it is told, and keeps what it would have been drawn from."""

    ids_B: torch.Tensor

    def __call__(self, log_weights_BV, depth_B, _):
        self.weights_BV = log_weights_BV.softmax(1)
        return self.ids_B

    def shares_B(self):
        """The probability of these draws."""
        return self.weights_BV.gather(1, self.ids_B[:, None])[:, 0]


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
    """float64 [B, N]: below which coin of its own the path ends at a draft; 0 in the padding.

    Found by bisection, all other coins against it.
    """
    limit_BN = torch.zeros(drafts.token_ids_BN.shape, dtype=torch.float64)
    cases = [(b, j) for b, tree in enumerate(trees) for j in range(len(tree))]
    if not cases:
        return limit_BN
    trees_C, at_C = (torch.tensor(one) for one in zip(*cases, strict=True))
    batch, rows_RV = repeated(drafts, logits_RV, trees_C)
    coins_CN = torch.ones((len(cases), drafts.width), dtype=torch.float64)
    low_C, high_C = (torch.full((len(cases),), end, dtype=torch.float64) for end in (0, 1))
    for _ in range(54):
        middle_C = (low_C + high_C) / 2
        coins_CN.scatter_(1, at_C[:, None], middle_C[:, None])
        verdict = rule(rows_RV, batch, coins_CN, Script(torch.zeros_like(at_C)))
        ends_there_C = (verdict.rows_BN == at_C[:, None]).any(1)
        low_C = torch.where(ends_there_C, middle_C, low_C)
        high_C = torch.where(ends_there_C, high_C, middle_C)
    limit_BN[trees_C, at_C] = low_C
    return limit_BN


def trees_emit(rule, trees, target, drafts=None):
    """{sequence: probability} of what one step emits."""
    drafts = as_batch(trees, V) if drafts is None else drafts
    logits_RV = target_rows(trees, target)
    limit_BN = limits(rule, trees, drafts, logits_RV)
    cases = [
        (b, *coins, *[ALMOST_ONE] * (drafts.width - len(tree)), y)
        for b, tree in enumerate(trees)
        for coins in itertools.product((0.0, ALMOST_ONE), repeat=len(tree))
        for y in range(V)
    ]
    case_CA = torch.tensor(cases, dtype=torch.float64)
    tree_C, coins_CN = case_CA[:, 0].long(), case_CA[:, 1:-1]
    limit_CN = limit_BN[tree_C]
    share_C = torch.tensor([tree.weight for tree in trees], dtype=torch.float64)[tree_C]
    share_C = share_C * torch.where(coins_CN == 0, limit_CN, 1 - limit_CN).prod(1)
    live_C = (share_C > 0).nonzero()[:, 0]
    script = Script(case_CA[live_C, -1].long())
    batch, rows_RV = repeated(drafts, logits_RV, tree_C[live_C])
    verdict = rule(rows_RV, batch, coins_CN[live_C], script)
    emitted = defaultdict(float)
    for ids, count, share in zip(
        verdict.token_ids_BN1.tolist(),
        verdict.num_emitted_B.tolist(),
        (share_C[live_C] * script.shares_B()).tolist(),
        strict=True,
    ):
        emitted[tuple(ids[:count])] += share
    return emitted


def bias(emitted, target, length=LONGEST):
    """Total variation between the first tokens and the target's own."""
    return total_variation(completed(emitted, target, length), joint(target, length))


def mean_tokens(emitted):
    return sum(len(sequence) * weight for sequence, weight in emitted.items())
