"""IBM's speculator in plain Python, one request and one token at a time, as the paper writes it."""

import math

import numpy as np

EPS = 1e-6


def unit_rms(x):
    mean_square = sum(float(v) ** 2 for v in x) / len(x)
    return np.array([float(v) / math.sqrt(mean_square + EPS) for v in x])


def gelu(x):
    return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x])


def chain_logits(hidden_D, token_ids, weights, *, n_predict, scale_input):
    """One float64 [V] per head: token_ids[j] is the token in front of head j's own.

    `weights(part, head)` is the array of "emb", "proj", "ln" (weight, bias) or "head".
    """
    state = np.asarray(hidden_D, dtype=np.float64)
    if scale_input:
        state = unit_rms(state) / math.sqrt(2)
    state_weight = 0.5 ** (0.5 / n_predict)
    logits = []
    for head, token in enumerate(token_ids):
        embedding = weights("emb", head)[token]
        inner_dim = len(embedding)
        emb_weight = math.sqrt((1 - state_weight**2) * (inner_dim / 2))
        z = weights("proj", head) @ state + emb_weight / state_weight * embedding
        scale, shift = weights("ln", head)
        state = gelu(unit_rms(z) * scale + shift)
        logits.append(weights("head", head) @ state)
    return logits
