"""Methods of one target side by side: what each brings, what it costs, what it keeps."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from outdraft.bench.side_by_side import (
    PLAIN,
    Sample,
    acceptance_length,
    are_identical,
    build_together,
    complete_in_turn,
    median_ratio,
    median_tokens_per_s,
    ms_per_step,
    share_target,
)
from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import SourceConfig
from outdraft.core.draft import Draft, DraftAsk
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.ops import Kernels
from outdraft.loading.methods import cache_bytes, host_proposers
from outdraft.loading.models import LoadedModels
from outdraft.models.modules import dtype_name

TEMPERATURES = (0, 1)
TOKENS_OF_KV = 1000  # whose keys, values and features are counted
MAX_TOKENS = 8  # of a draft of the host that is timed
VOCABULARY = 32_000
LONG_CONTEXT = 32_768
NUM_STEPS = 100


def temperature_key(temperature: int) -> str:
    """Under which a method's numbers at one temperature stand."""
    return f"temperature_{temperature}"


def measure_methods(
    configs: Mapping[str, EngineConfig],
    warm_up: str,
    prompts: Sequence[str],
    max_tokens: int,
    on_done: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """The result: plain decoding, and under `methods` each of the others.

    Every prompt is completed by `max_tokens` tokens, whatever they are. Each temperature has
    engines of its own, so that no proposer remembers a prompt from the other one.

    Args:
        configs: with plain decoding under PLAIN, the first one.
        on_done: called whenever a request is done, warm-ups included.

    Raises:
        ConfigError: a network is missing or does not fit the target.
    """
    models = share_target(configs)
    result = {name: _kept(configs[name], models[name]) for name in configs}
    for temperature in TEMPERATURES:
        engines = build_together({name: (configs[name], models[name]) for name in configs})
        one = SamplingParams(
            temperature=float(temperature), max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        params = [one] * len(prompts)  # without seeds: verified as the configuration says
        samples = complete_in_turn(engines, warm_up, prompts, params, on_done)
        for name, own in samples.items():
            result[name][temperature_key(temperature)] = _speed(own, samples[PLAIN])
            if temperature == 0:
                result[name]["identical"] = are_identical(own, samples[PLAIN])
    plain = result.pop(PLAIN)
    target = models[PLAIN]
    return {
        "model_id": configs[PLAIN].model,
        "dtype": dtype_name(target.target.dtype),
        "device": str(target.device),
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "all_identical": all(one["identical"] for one in result.values()),
        PLAIN: {
            "weight_bytes": target.target.memory_bytes,
            "kv_bytes_per_1k_tokens": _per_1k_tokens(
                configs[PLAIN],
                lambda size: cache_bytes(target.target.shard, size, target.target.dtype),
            ),
            **{key: plain[key] for key in map(temperature_key, TEMPERATURES)},
        },
        "methods": result,
    }


def _kept(config: EngineConfig, models: LoadedModels) -> dict[str, Any]:
    """Memory, and the time of the host's search."""
    kept: dict[str, Any] = {"weight_bytes": 0, "kv_bytes_per_1k_tokens": 0}
    if models.drafter is not None:
        kept["weight_bytes"] = models.drafter.network.memory_bytes
        kept["kv_bytes_per_1k_tokens"] = _per_1k_tokens(config, models.drafter.bytes_per_block)
    if config.speculation.sources:
        host_us = draft_us_per_request_32k(config.speculation.sources, models.kernels)
        kept |= {} if host_us is None else {"draft_us_per_request_32k": host_us}
    return kept


def _per_1k_tokens(config: EngineConfig, bytes_per_block: Callable[[int], int]) -> int:
    size = config.cache.block_size
    return bytes_per_block(size) * TOKENS_OF_KV // size


def _speed(samples: Sequence[Sample], plain: Sequence[Sample]) -> dict[str, float]:
    return {
        "acceptance_length": acceptance_length(samples),
        "draft_ms": ms_per_step(samples, lambda stats: stats.draft_s),
        "verify_ms": ms_per_step(samples, lambda stats: stats.verify_s),
        "sample_ms": ms_per_step(samples, lambda stats: stats.sample_s),
        "host_ms": ms_per_step(samples, lambda stats: stats.host_s),
        "tokens_per_s": median_tokens_per_s(samples),
        "ratio_to_plain": median_ratio(samples, plain),
    }


def make_phrases(rng: np.random.Generator, context_len: int) -> list[np.ndarray]:
    """Phrases of a text of that length: int [40] each.

    Phrases that come again, as with edits and agents, let most steps find a match.
    """
    return [rng.integers(0, VOCABULARY, 40) for _ in range(max(8, context_len // 200))]


def phrases_text(rng: np.random.Generator, phrases: list[np.ndarray], length: int) -> np.ndarray:
    """Phrases in random order, cut short at random: int32 [length]."""
    pieces: list[np.ndarray] = []
    missing = length
    while missing > 0:
        phrase = phrases[rng.integers(len(phrases))]
        pieces.append(phrase[: rng.integers(2, len(phrase))])
        missing -= len(pieces[-1])
    return np.concatenate(pieces)[:length].astype(np.int32)


def measure(
    propose: Callable[[Sequence[DraftAsk]], list[Draft]],
    texts: list[np.ndarray],
    context_len: int,
    num_steps: int,
) -> dict[str, list[float]]:
    """Per step: microseconds a request, and tokens drafted a request; the prompt's first."""
    rng = np.random.default_rng(1)
    lengths = [context_len] * len(texts)
    times_us: list[float] = []
    drafted: list[float] = []
    for _ in range(num_steps + 1):
        asks = [
            DraftAsk(str(i), text[:length], MAX_TOKENS)
            for i, (text, length) in enumerate(zip(texts, lengths, strict=True))
        ]
        start_s = time.perf_counter()
        drafts = propose(asks)
        times_us.append((time.perf_counter() - start_s) * 1e6 / len(texts))
        drafted.append(sum(map(len, drafts)) / len(texts))
        lengths = [length + int(rng.integers(1, 6)) for length in lengths]
    return {"times_us": times_us, "drafted": drafted}


def draft_us_per_request_32k(sources: Sequence[SourceConfig], kernels: Kernels) -> float | None:
    """Median time of a step's draft for one request of 32k tokens; None if a network drafts too."""
    proposers = host_proposers(sources, kernels)
    if len(proposers) < len(sources):
        return None

    def propose(asks: Sequence[DraftAsk]) -> list[Draft]:
        return [draft for proposer in proposers for draft in proposer.propose(asks)]

    rng = np.random.default_rng(0)
    phrases = make_phrases(rng, LONG_CONTEXT)
    text = phrases_text(rng, phrases, LONG_CONTEXT + 5 * NUM_STEPS + 5)
    return statistics.median(measure(propose, [text], LONG_CONTEXT, NUM_STEPS)["times_us"][1:])
