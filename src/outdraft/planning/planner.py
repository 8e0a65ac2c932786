"""Plans speculation: what a token takes by concurrency, how long drafts should be, what fits.

A plan is arithmetic on predicted steps. Drafts of length 0 are plain decoding: the drafter then
costs nothing, which is what this engine does.
"""

import itertools
from bisect import bisect
from collections.abc import Sequence
from typing import Any

import numpy as np

from outdraft.config.fields import check_whole
from outdraft.core.errors import ConfigError
from outdraft.planning.step_time import Predictor, Setup

MEMORY_SHARE = 0.9  # of a card; the rest is for activations and the runtime
_MOST_PLANNED = 100_000  # running requests: the time of a plan grows with them
_MOST_REQUESTS = 4096


def tokens_by_length(acceptance: Sequence[float], max_length: int) -> list[float]:
    """Expected tokens of a step by length 0..max_length, the bonus token included.

    Args:
        acceptance: one chance that holds at every position, or, by position, the share of steps in
            which that position was accepted, as engines report it. Further positions go on with the
            last ratio.

    Raises:
        ConfigError: not within [0, 1], or rising.
    """
    if not acceptance or not all(0 <= value <= 1 for value in acceptance):
        raise ConfigError(f"acceptance must be within 0 and 1, got {list(acceptance)}")
    if any(later > value for value, later in itertools.pairwise(acceptance)):
        raise ConfigError(f"acceptance by position cannot rise, got {list(acceptance)}")
    given = acceptance[:max_length]
    before, last = [1.0, *acceptance][-2:]
    ratio = last / before if before else 0.0
    more = last * ratio ** np.arange(1, max_length - len(given) + 1)
    return [1.0, *(1.0 + np.cumsum([*given, *more])).tolist()]


def make_plan(
    predictor: Predictor, tokens_of: Sequence[float], concurrencies: Sequence[int]
) -> dict[str, Any]:
    """Everything `outdraft plan` shows.

    Args:
        tokens_of: tokens of a step by length of drafts, see `tokens_by_length`.

    Returns:
        mode: "roofline" or "calibrated".
        basis: what the predictions rest on.
        levels: by concurrency, see `_level`.
        break_even_concurrency: most requests at which drafting is faster than not to draft; 0:
            it never is; None: it still is at thousands.

    Raises:
        ConfigError: a number is not positive, or there are more requests than can be planned for.
    """
    for concurrency in concurrencies:
        check_whole("concurrency", concurrency, 1, _MOST_PLANNED)
    memory = plan_memory(predictor.setup, len(tokens_of) - 1)
    return {
        "mode": predictor.mode,
        "basis": predictor.basis,
        "setup": describe(predictor.setup),
        "levels": [_level(predictor, tokens_of, number, memory) for number in concurrencies],
        "memory": memory,
        "break_even_concurrency": break_even_concurrency(predictor, tokens_of),
    }


def tpots_s(predictor: Predictor, tokens_of: Sequence[float], num_requests: int) -> list[float]:
    """Seconds for each token of a request, by length of drafts."""
    return [
        predictor.step(num_requests, length, tokens).total_s / tokens
        for length, tokens in enumerate(tokens_of)
    ]


def best_length(predictor: Predictor, tokens_of: Sequence[float], num_requests: int) -> int:
    """The length with the least time for each token; the shorter one of equals."""
    return int(np.argmin(tpots_s(predictor, tokens_of, num_requests)))


def break_even_concurrency(predictor: Predictor, tokens_of: Sequence[float]) -> int | None:
    """Most requests at which some length beats plain decoding; 0: none; None: beyond
    _MOST_REQUESTS. With experts a few requests may not pay while more do: their rows meet experts
    that others read anyway."""

    def loses(num_requests: int) -> bool:
        return best_length(predictor, tokens_of, num_requests) == 0

    doubled = [2**power for power in range(_MOST_REQUESTS.bit_length())]
    low = max(itertools.filterfalse(loses, doubled), default=0)
    if low >= _MOST_REQUESTS:
        return None
    return low + bisect(range(low + 1, 2 * low), False, key=loses)


def break_even_acceptance(predictor: Predictor, num_requests: int, max_length: int) -> float | None:
    """The least chance, the same at every position, at which some length is as fast as plain."""

    def pays(chance: float) -> bool:
        tokens_of = tokens_by_length((chance,), max_length)
        return best_length(predictor, tokens_of, num_requests) > 0

    low, high = 0.0, 0.999
    if not pays(high):
        return None
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def _level(
    predictor: Predictor, tokens_of: Sequence[float], concurrency: int, memory: dict[str, Any]
) -> dict[str, Any]:
    """A plan for one concurrency; times are a request's.

    Returns:
        tpot_ms: with the best length, and its band.
        tpot_ms_by_length: from 0, plain decoding.
        step_ms: of the best length, by what they go to.
        break_even_acceptance: the least chance at every position at which some length is no
            slower than plain decoding; None: none below 1 is enough.
        fits: whether all requests have room in memory.
    """
    tpots = tpots_s(predictor, tokens_of, concurrency)
    length = int(np.argmin(tpots))
    tokens = tokens_of[length]
    best, low_s, high_s = predictor.predict(concurrency, length, tokens)
    _, plain_low_s, plain_high_s = predictor.predict(concurrency, 0, 1.0)
    return {
        "concurrency": concurrency,
        "best_length": length,
        "tokens_a_step": tokens,
        "tpot_ms": 1e3 * tpots[length],
        "tpot_ms_low": 1e3 * low_s / tokens,
        "tpot_ms_high": 1e3 * high_s / tokens,
        "plain_tpot_ms": 1e3 * tpots[0],
        "plain_tpot_ms_low": 1e3 * plain_low_s,
        "plain_tpot_ms_high": 1e3 * plain_high_s,
        "speedup": tpots[0] / tpots[length],
        "tokens_per_s": concurrency / tpots[length],
        "tpot_ms_by_length": [1e3 * tpot for tpot in tpots],
        "step_ms": {
            "draft": 1e3 * best.draft_s,
            "target": 1e3 * best.target_s,
            "communication": 1e3 * best.communication_s,
            "host": 1e3 * best.host_s,
        },
        "break_even_acceptance": break_even_acceptance(predictor, concurrency, len(tokens_of) - 1),
        "fits": concurrency <= memory["max_requests"],
    }


def plan_memory(setup: Setup, max_length: int) -> dict[str, Any]:
    """Sum up the fullest card: its share of the target, and of the drafter where it is.

    Returns:
        kv_gib: GiB beside the weights; below 0 where they do not fit.
        max_tokens, max_requests: that have room there.
    """
    card_bytes = setup.hardware.memory_bytes
    usable = MEMORY_SHARE * card_bytes
    target = setup.target.weight_bytes / setup.tp
    target_kv = setup.target.kv_bytes_per_token / setup.tp
    drafter = drafter_kv = 0.0
    if setup.drafter is not None:
        drafter = setup.drafting_network(max_length).weight_bytes / setup.draft_tp
        drafter_kv = setup.drafter.kv_bytes_per_token / setup.draft_tp
    room = usable - target - drafter
    max_tokens = max(0, int(room / (target_kv + drafter_kv)))
    return {
        "card_gib": card_bytes / 2**30,
        "usable_gib": usable / 2**30,
        "target_weights_gib": target / 2**30,
        "drafter_weights_gib": drafter / 2**30,
        "kv_gib": room / 2**30,
        "kv_bytes_per_token": target_kv + drafter_kv,
        "drafter_kv_share": drafter_kv / (target_kv + drafter_kv),
        "max_tokens": max_tokens,
        "max_requests": max_tokens // (setup.prompt_tokens + setup.output_tokens),
    }


def describe(setup: Setup) -> dict[str, Any]:
    """The setup in words and numbers, for people and files."""
    drafter = setup.drafter
    return {
        "target": setup.target.name,
        "target_dtype": setup.target.dtype,
        "kv_dtype": setup.target.kv_dtype,
        "method": setup.method,
        "drafter": drafter.name if drafter is not None else None,
        "drafter_dtype": drafter.dtype if drafter is not None else None,
        "hardware": setup.hardware.title,
        "tp": setup.tp,
        "draft_tp": setup.draft_tp,
        "interconnect": setup.hardware.link if setup.tp > 1 else None,
        "graphs": setup.hardware.graphs,
        "prompt_tokens": setup.prompt_tokens,
        "output_tokens": setup.output_tokens,
    }
