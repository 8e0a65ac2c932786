"""Processed distributions, one row at a time, straight from the definitions. Slow on purpose."""

import math
from collections import Counter


def processed_logits(logits, params, prompt, output, *, bad_words=(), stop_ids=()) -> list[float]:
    """Logits (Python floats) of the next token after `prompt + output`; -inf where impossible."""
    x = list(map(float, logits))
    vocab = range(len(x))
    if params.allowed_token_ids is not None:
        among = list(x)
        x = [x[v] if v in params.allowed_token_ids else -math.inf for v in vocab]
        if max(x) == -math.inf:
            x[among.index(max(among))] = max(among)
    allowed = list(x)
    for word in bad_words:
        prefix = list(word[:-1])
        if len(prefix) <= len(output) and list(output[len(output) - len(prefix) :]) == prefix:
            x[word[-1]] = -math.inf
    if len(output) < params.min_tokens:
        for v in stop_ids:
            x[v] = -math.inf
    if max(x) == -math.inf:
        best = allowed.index(max(allowed))
        x[best] = allowed[best]
    for v, bias in (params.logit_bias or {}).items():
        x[v] += bias
    counts = Counter(output)
    for v in {*prompt, *output}:
        r = params.repetition_penalty
        x[v] = x[v] / r if x[v] > 0 else x[v] * r
    for v, count in counts.items():
        x[v] -= params.frequency_penalty * count + params.presence_penalty
    if params.temperature == 0:
        return x
    x = [(value - max(x)) / params.temperature for value in x]
    if params.min_p > 0:
        x = [value if math.exp(value) >= params.min_p else -math.inf for value in x]
    if 0 < params.top_k < len(x):
        kth = sorted(x, reverse=True)[params.top_k - 1]
        x = [value if value >= kth else -math.inf for value in x]
    if params.top_p < 1:
        x = _nucleus(x, params.top_p)
    return x


def probabilities(x) -> list[float]:
    """Softmax of logits."""
    weights = [math.exp(value - max(x)) for value in x]
    return [weight / sum(weights) for weight in weights]


def _nucleus(x, top_p):
    probs = probabilities(x)
    kept, mass = set(), 0.0
    for v in sorted(range(len(x)), key=lambda v: (-x[v], v)):
        if mass >= top_p:
            break
        kept.add(v)
        mass += probs[v]
    return [value if v in kept else -math.inf for v, value in enumerate(x)]
