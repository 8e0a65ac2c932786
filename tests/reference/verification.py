"""The verification rules, one request at a time, as the papers write them. Slow on purpose."""

import itertools
from collections import defaultdict

import numpy as np


def walk(token_ids, parents, choices):
    """(emitted ids, accepted rows) of one tree along the target's choices (row 0 is the root)."""
    row, rows = 0, []
    while True:
        children = [
            j for j, parent in enumerate(parents) if parent == row and token_ids[j] == choices[row]
        ]
        if not children:
            return [token_ids[j] for j in rows] + [choices[row]], rows
        rows.append(children[0])
        row = children[0] + 1


def accept_tokens(p, q, ids, coins):
    """(accepted, weight): Leviathan et al. 2023. p has one row more than q."""
    for i, x in enumerate(ids):
        if not coins[i] < p[i][x] / q[i][x]:
            return i, 1.0
    return len(ids), 1.0


def accept_block(p, q, ids, coins):
    """(accepted, weight): Sun et al. 2025, algorithm 2."""
    weights = [1.0]
    for i, x in enumerate(ids):
        weights.append(min(1.0, weights[-1] * p[i][x] / q[i][x]))
    tau = 0
    for i in range(1, len(ids) + 1):
        if i == len(ids):
            h = weights[i]
        else:
            left = np.maximum(weights[i] * p[i] - q[i], 0).sum()
            h = left / (left + 1 - weights[i]) if left + 1 - weights[i] > 0 else 0.0
        if coins[i - 1] < h:
            tau = i
    return tau, weights[tau]


def last_distribution(p, q, accepted, weight):
    """Distribution of the token after the accepted ones."""
    if accepted == len(q):
        return p[accepted]
    residual = np.maximum(weight * p[accepted] - q[accepted], 0)
    return residual / residual.sum() if residual.sum() > 0 else p[accepted]


def tree_stops(token_ids, parents, q, p):
    """Where traversal verification may end a tree, in the order in which it is asked.

    Each is (row, with which probability, distribution of the token behind it). Weng et al. 2025,
    algorithm 1, by recursion. `q[j]`: what draft j was drawn from, None if it is deterministic; p
    has one row more.
    """
    stops = []

    def visit(row, weight):
        rest = np.asarray(p[row], dtype=np.float64)
        for j in [j for j, parent in enumerate(parents) if parent == row]:
            drawn_from = np.eye(len(rest))[token_ids[j]] if q[j] is None else q[j]
            visit(j + 1, min(1.0, weight * rest[token_ids[j]] / drawn_from[token_ids[j]]))
            left = np.maximum(weight * rest - drawn_from, 0)
            whole = left.sum() + 1 - weight
            weight = left.sum() / whole if whole > 0 else 0.0
            rest = left / left.sum() if left.sum() > 0 else left
        stops.append((row, weight, rest if rest.sum() > 0 else p[row]))

    visit(0, 1.0)
    return [*stops[:-1], (0, 1.0, stops[-1][2])]


def path_to(parents, row):
    """Drafts from the root's child to a row."""
    path = []
    while row:
        path.insert(0, row - 1)
        row = parents[row - 1]
    return path


def walk_tree(token_ids, parents, q, p, coins, draw):
    """(emitted ids, accepted drafts); `draw(distribution, depth)` draws a token."""
    for row, share, last in tree_stops(token_ids, parents, q, p):
        if row == 0 or coins[row - 1] < share:
            path = path_to(parents, row)
            return [*(token_ids[j] for j in path), draw(last, len(path))], path
    raise AssertionError("the root ends every walk")


def tree_outcomes(token_ids, parents, q, p):
    """{emitted ids: probability} of `walk_tree` over all coins and draws."""
    outcomes, chance = defaultdict(float), 1.0
    for row, share, last in tree_stops(token_ids, parents, q, p):
        ids = tuple(token_ids[j] for j in path_to(parents, row))
        for y in np.flatnonzero(np.asarray(last) * chance * share > 0).tolist():
            outcomes[(*ids, y)] += last[y] * chance * share
        chance *= 1 - share
    return outcomes


def typical_path(token_ids, parents, p, threshold, alpha):
    """Rows of the longest typical path: Cai et al. 2024. Ties: the likelier, then the first."""
    paths = {0: ([], 0.0)}  # row: (its path, log-likelihood), of rows that are reached
    best = (0, 0.0, 0)
    for j, parent in enumerate(parents):
        if parent not in paths:
            continue
        entropy = -sum(share * np.log(share) for share in p[parent] if share > 0)
        share = p[parent][token_ids[j]]
        if share > min(threshold, alpha * np.exp(-entropy)):
            path, likelihood = paths[parent]
            paths[j + 1] = ([*path, j], likelihood + np.log(share))
            best = max(best, (len(path) + 1, paths[j + 1][1], -j - 1))
    return paths[-best[2]][0]


def joint(model, length):
    """{sequence: probability} of plain decoding; `model(prefix)` is the next distribution."""
    sequences = {(): 1.0}
    for _ in range(length):
        sequences = {
            (*prefix, v): weight * share
            for prefix, weight in sequences.items()
            for v, share in enumerate(model(prefix))
            if weight * share > 0
        }
    return sequences


def completed(emitted, model, length):
    """The joint of the first `length` tokens when `emitted` {sequence: weight} is decoded on."""
    whole = defaultdict(float)
    for sequence, weight in emitted.items():
        if len(sequence) >= length:
            whole[sequence[:length]] += weight
            continue
        rest = joint(lambda tail, head=sequence: model(head + tail), length - len(sequence))
        for tail, share in rest.items():
            whole[sequence + tail] += weight * share
    return whole


def total_variation(one, other):
    """Half the L1 distance of two {outcome: probability}."""
    return 0.5 * sum(abs(one.get(k, 0.0) - other.get(k, 0.0)) for k in {*one, *other})


def all_sequences(vocab_size, length):
    """Every sequence, in lexicographic order."""
    return list(itertools.product(range(vocab_size), repeat=length))
