"""Medusa heads in numpy, one head and one row at a time, from a dict of named arrays."""

import numpy as np


def silu(x):
    return x / (1 + np.exp(-x))


def head_logits(hidden_D, blocks, head_VD, scale=1.0):
    """float64 [V]: blocks is a list of (weight, bias or None)."""
    h = np.asarray(hidden_D, dtype=np.float64)
    for weight, bias in blocks:
        inner = np.array([sum(w * x for w, x in zip(row, h, strict=True)) for row in weight])
        h = h + silu(inner if bias is None else inner + bias)
    return scale * np.array([sum(w * x for w, x in zip(row, h, strict=True)) for row in head_VD])


def over_vocabulary(logits_E, token_map, vocab_size, unknown):
    """float64 [vocab_size] of a head that knows the tokens of the map only."""
    whole = np.full(vocab_size, unknown)
    for logit, token in zip(logits_E, token_map, strict=True):
        whole[token] = logit
    return whole
