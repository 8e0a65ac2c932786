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
