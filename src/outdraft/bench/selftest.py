"""Tests that speculation keeps its promises for the user's own models.

Greedy ids must be those of plain decoding. Sampled tokens must have the target's distribution: many
short texts are drawn with drafts, and after each beginning that came up often enough the counts of
the next token are compared with the target's own probabilities.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outdraft.bench.driver import complete_alone
from outdraft.bench.in_process import run_batch
from outdraft.bench.side_by_side import (
    PLAIN,
    Samples,
    complete_in_turn,
    median_speed,
    sum_of_drafts,
)
from outdraft.bench.workloads import BenchRequest
from outdraft.core.sampling import SamplingParams
from outdraft.engine.engine import Engine

SPECULATIVE = "speculative"  # as it is configured
ALWAYS = "always"  # the same, but every step drafts as much as it may
DRAWN_TOKENS = 4  # of each sampled text
LEAST_COUNT = 40  # of a beginning whose next token is looked at
LEAST_EXPECTED = 5.0  # of a token that is counted by itself
MOST_LOGPROBS = 100
SIMULATIONS = 20_000
LEAST_P = 1e-3  # a smaller chance of such counts is no accident


# Counts of the tokens that followed one beginning, and the target's chances of them. The last place
# stands for all tokens that are expected too seldom to be counted alone.
Counts = tuple[NDArray[np.int64], NDArray[np.float64]]


def self_test(
    engines: Mapping[str, Engine],
    prompts: Sequence[str],
    max_tokens: int,
    num_samples: int,
    num_sampled_prompts: int,
    on_done: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """All findings; `passed` says whether all is as promised.

    `speed` is that of the configured engine, but acceptance is that of the one that always drafts.

    Args:
        engines: PLAIN, SPECULATIVE and ALWAYS; the last two have seeds of their own, so that their
            drawn texts are independent.
        prompts: the last one is for warming up.
        num_samples: texts that both draw for each of the first `num_sampled_prompts`.
    """
    *measured, warm_up = prompts
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    samples = complete_in_turn(engines, warm_up, measured, [greedy] * len(measured), on_done)
    differences = [
        difference
        for name in (SPECULATIVE, ALWAYS)
        for number, prompt in enumerate(measured)
        if (difference := first_difference(engines[PLAIN], prompt, number, name, samples))
    ]
    sampled = measured[:num_sampled_prompts]
    counts = [
        one
        for name in (SPECULATIVE, ALWAYS)
        for prompt in sampled
        for one in counted(engines[PLAIN], engines[name], prompt, num_samples)
    ]
    p_value = fit(counts)
    plain_tokens_per_s, _ = median_speed(samples[PLAIN], samples[PLAIN])
    tokens_per_s, ratio = median_speed(samples[SPECULATIVE], samples[PLAIN])
    drafts = sum_of_drafts(samples[ALWAYS])
    return {
        "num_prompts": len(measured),
        "max_tokens": max_tokens,
        "differences": differences,
        "num_samples": 2 * num_samples * len(sampled),
        "num_beginnings": len(counts),
        "p_value": p_value,
        "speed": {
            "tokens_per_s": tokens_per_s,
            "plain_tokens_per_s": plain_tokens_per_s,
            "ratio_to_plain": ratio,
            "acceptance_length": drafts.acceptance_length,
            "acceptance_rate": drafts.acceptance_rate,
        },
        "passed": not differences and p_value >= LEAST_P,
    }


def first_difference(
    plain: Engine, prompt: str, number: int, name: str, samples: Mapping[str, Samples]
) -> dict[str, Any] | None:
    """Find the first token at which an engine's text is not plain decoding's; None: they are equal.

    Returns:
        engine: whose text it is, `name`.
        place: tokens before it.
        gap: nats by which the target prefers its own token to that of the other text, 0 for a tie;
            None: it does not list the other one among its most likely.
    """
    own, other = samples[PLAIN][number].token_ids, samples[name][number].token_ids
    length = min(len(own), len(other))
    place = next((i for i in range(length) if own[i] != other[i]), length)
    if place == len(own) == len(other):
        return None
    ids = [text[place] if place < len(text) else None for text in (own, other)]
    params = SamplingParams(
        temperature=0.0, max_tokens=place + 1, ignore_eos=True, logprobs=MOST_LOGPROBS
    )
    output = complete_alone(plain, "gap", prompt, params).output
    logprobs = output.outputs[0].logprobs
    assert logprobs is not None
    likely = logprobs[place] if place < len(logprobs) else {}
    gap = None
    if ids[0] in likely and ids[1] in likely:
        gap = likely[ids[0]].logprob - likely[ids[1]].logprob
    return {
        "engine": name,
        "prompt": number,
        "place": place,
        "plain_id": ids[0],
        "speculative_id": ids[1],
        "gap": gap,
    }


def counted(plain: Engine, drafting: Engine, prompt: str, num_samples: int) -> list[Counts]:
    """Count the tokens after each frequent beginning of texts that were drawn with drafts."""
    prompt_ids = tuple(plain.inputs.encoded(prompt).token_ids.tolist())
    params = SamplingParams(temperature=1.0, ignore_eos=True, detokenize=False)
    requests = [BenchRequest(prompt_ids, DRAWN_TOKENS)] * num_samples
    done = run_batch(drafting, requests, params, float("inf"))
    nexts: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
    for output in done.finished:
        ids = tuple(output.outputs[0].token_ids)
        for place, token_id in enumerate(ids):
            nexts[ids[:place]][token_id] += 1
    frequent = {prefix: of for prefix, of in nexts.items() if of.total() >= LEAST_COUNT}
    return [_counts(plain, prompt_ids, prefix, of) for prefix, of in sorted(frequent.items())]


def fit(counts: Sequence[Counts]) -> float:
    """The probability of counts that are as far from those expected; 1 without any.

    The likelihood ratio of all beginnings together, against draws from the expected chances
    themselves: exact for small counts, too.
    """
    rng = np.random.default_rng(0)
    total, simulated = 0.0, np.zeros(SIMULATIONS)
    for observed, chances in counts:
        total += float(_likelihood_ratio(observed, chances))
        drawn = rng.multinomial(int(observed.sum()), chances, SIMULATIONS)
        simulated += _likelihood_ratio(drawn, chances)
    slack = 1e-9 * (1 + abs(total))
    return (1 + int((simulated >= total - slack).sum())) / (1 + SIMULATIONS)


def _likelihood_ratio(counts: NDArray[np.int64], chances: NDArray[np.float64]) -> Any:
    """2 sum O ln(O / E) over the last axis; infinite for what cannot happen."""
    expected = counts.sum(-1, keepdims=True) * chances
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(counts > 0, counts * np.log(counts / expected), 0.0)
    return 2 * terms.sum(-1)


def _counts(
    plain: Engine, prompt_ids: tuple[int, ...], prefix: tuple[int, ...], nexts: Counter[int]
) -> Counts:
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=MOST_LOGPROBS)
    prompt = list(prompt_ids + prefix)
    output = complete_alone(plain, "chances", prompt, params).output
    assert output.outputs[0].logprobs is not None
    chances = {
        token_id: float(np.exp(one.logprob))
        for token_id, one in output.outputs[0].logprobs[0].items()
        if one.rank <= MOST_LOGPROBS
    }
    number = nexts.total()
    alone = [token_id for token_id, chance in chances.items() if number * chance >= LEAST_EXPECTED]
    observed = [nexts[token_id] for token_id in alone]
    expected = np.array([*(chances[token_id] for token_id in alone), 0.0])
    expected[-1] = max(0.0, 1 - expected.sum())
    return np.array([*observed, number - sum(observed)]), expected / expected.sum()
