"""Attention of one row after another in plain Python: the slow twin of kernels/torch/attention.py.

It knows no blocks and no masks: a request is its keys and values in cache order, and every row
lists the keys that it sees by reading the contract of attention/base.py aloud.
"""

import math
from dataclasses import dataclass, field

from outdraft.attention.base import AttentionForm


@dataclass
class DenseRequest:
    """One request: cache [key][kv head][c], then rows; parents of drafts as in core/draft.py.

    `drafts` are the drafted tokens that are rows of this call, behind the causal ones.
    """

    context_len: int
    num_causal: int
    parents: list[int]
    drafts: list[int]
    keys: list[list[list[float]]]
    values: list[list[list[float]]]
    queries: list[list[list[float]]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return self.num_causal + len(self.drafts)


def depth(request: DenseRequest, draft: int) -> int:
    """How far drafted row `draft` (from 0) is below the root."""
    parent = request.parents[draft]
    return 1 if parent == 0 else 1 + depth(request, parent - 1)


def text_position(request: DenseRequest, key: int) -> int:
    """Position in the text of the token at cache index `key`."""
    first_draft = request.context_len + request.num_causal
    if key < first_draft:
        return key
    return first_draft - 1 + depth(request, key - first_draft)


def key_of(request: DenseRequest, row: int) -> int:
    """Cache index of the row's own key."""
    if row < request.num_causal:
        return request.context_len + row
    return request.context_len + request.num_causal + request.drafts[row - request.num_causal]


def seen_keys(request: DenseRequest, row: int, form: AttentionForm) -> list[int]:
    """Cache indices that the row sees."""
    if row < request.num_causal:
        keys = list(range(request.context_len + row + 1))
    else:
        keys = list(range(request.context_len + request.num_causal))
        draft = request.drafts[row - request.num_causal]
        while draft >= 0:
            keys.append(request.context_len + request.num_causal + draft)
            draft = request.parents[draft] - 1
    position = text_position(request, key_of(request, row))
    places = {key: text_position(request, key) for key in keys}
    if form.window is not None:
        keys = [key for key in keys if places[key] > position - form.window]
    if form.chunk is not None:
        keys = [key for key in keys if places[key] // form.chunk == position // form.chunk]
    return keys


def _dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def attend_row(request: DenseRequest, row: int, form: AttentionForm) -> list[list[float]]:
    """[head][c]: what one row reads."""
    keys = seen_keys(request, row, form)
    num_heads, num_kv_heads = len(request.queries[row]), len(request.keys[0])
    heads = []
    for head, query in enumerate(request.queries[row]):
        kv_head = head // (num_heads // num_kv_heads)
        scores = [form.scale * _dot(query, request.keys[key][kv_head]) for key in keys]
        if form.soft_cap is not None:
            scores = [form.soft_cap * math.tanh(score / form.soft_cap) for score in scores]
        sinks = [] if form.sinks_H is None else [float(form.sinks_H[head])]
        top = max(scores + sinks)
        weights = [math.exp(score - top) for score in scores]
        total = math.fsum(weights + [math.exp(sink - top) for sink in sinks])
        heads.append(
            [
                math.fsum(
                    weight * request.values[key][kv_head][c]
                    for weight, key in zip(weights, keys, strict=True)
                )
                / total
                for c in range(len(request.values[0][kv_head]))
            ]
        )
    return heads
