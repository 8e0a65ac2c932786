"""Batches of sampling parameters, as the runner makes them of what it is told of its requests."""

from collections.abc import Sequence

import torch

from outdraft.core.plan import TokenRules
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.sampling import SamplingBatch


def batch_of_params(
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int],
    vocab_size: int,
    device: torch.device | str,
    shares_noise: bool = False,
    bad_words: Sequence[Sequence[Sequence[int]]] | None = None,
    stop_ids: Sequence[Sequence[int]] | None = None,
) -> SamplingBatch:
    """One batch of requests, in order; `seeds`, `bad_words`, `stop_ids`: of each request."""
    words, stops = bad_words or [()] * len(params), stop_ids or [()] * len(params)
    rules = [
        TokenRules(
            one,
            seed,
            tuple(sorted(ends)) if one.min_tokens > 0 else (),
            tuple(tuple(word) for word in own),
        )
        for one, seed, own, ends in zip(params, seeds, words, stops, strict=True)
    ]
    return SamplingBatch.from_rules(
        rules, vocab_size=vocab_size, device=device, shares_noise=shares_noise
    )
