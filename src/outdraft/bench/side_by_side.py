"""Several engines over one target, which complete the same prompts in turn.

Prompt by prompt all engines take their turn, so that a machine whose speed drifts treats them
alike; what is compared is compared prompt by prompt: what each method brings, costs and keeps.
"""

import statistics
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from outdraft.bench.driver import complete_alone
from outdraft.config.engine import EngineConfig, SchedulerConfig
from outdraft.config.speculation import SourceConfig, parse_speculative_config
from outdraft.core.draft import Draft, DraftAsk
from outdraft.core.errors import ConfigError
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.build import build_engine
from outdraft.engine.engine import Engine
from outdraft.engine.stats import StatsTotal
from outdraft.kernels.ops import Kernels
from outdraft.loading.memory import device_memory, plan_together
from outdraft.loading.methods import cache_bytes, host_proposers
from outdraft.loading.models import LoadedModels, load_models, with_drafter
from outdraft.models.modules import dtype_name

Name = TypeVar("Name", bound=Hashable)

PLAIN = "plain"  # decoding without drafts, with which everything is compared
NUM_DRAFTS = 4  # a step, of the methods that `method_configs` compares, but for suffix lookup
TEMPERATURES = (0, 1)
TOKENS_OF_KV = 1000  # whose keys, values and features are counted
HOST_DRAFT_TOKENS = 8  # of a draft of the host that is timed
VOCABULARY = 32_000
LONG_CONTEXT = 32_768
HOST_STEPS = 100


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt that one engine completed."""

    token_ids: list[int]
    num_decoded: int  # tokens after the first ones
    decode_s: float  # time inside of the steps that made them
    stats: StatsTotal  # of those steps; the prompt's own is left out
    origins: Sequence[str] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.num_decoded / self.decode_s if self.decode_s else 0.0


Samples = Sequence[Sample]  # the prompts that one engine completed


class SharedModels:
    """One target for many configurations, and each network that drafts once."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[object, ...], LoadedModels] = {}

    def of(self, config: EngineConfig) -> LoadedModels:
        """Models of a configuration; those that no other one needed are loaded.

        Raises:
            ConfigError: a model is missing or does not fit, or the target is another one, or one
                of several ranks: these run one engine at a time.
        """
        if config.parallel.has_ranks:
            raise ConfigError("engines that are compared need tensor_parallel_size=1")
        one, key = config.speculation.network, ()
        if one is not None:
            key = (one.source, one.model, one.parallel_drafting, one.quantization, one.kv_budget)
        if key not in self._loaded:
            others = list(self._loaded.values())
            self._loaded[key] = with_drafter(others[0], config) if others else load_models(config)
        return self._loaded[key]


def share_target(configs: Mapping[str, EngineConfig]) -> dict[str, LoadedModels]:
    """The models of each configuration, see SharedModels."""
    shared = SharedModels()
    return {name: shared.of(config) for name, config in configs.items()}


def build_together(parts: Mapping[Name, tuple[EngineConfig, LoadedModels]]) -> dict[Name, Engine]:
    """Build engines that live at once and share the memory, see `plan_together`.

    Raises:
        ConfigError: one of them cannot be built, or there is too little memory for them.
    """
    own = list(parts.values())
    plans = plan_together(own, device_memory(own[0][1].device))
    return {
        name: build_engine(*part, plan)[0]
        for (name, part), plan in zip(parts.items(), plans, strict=True)
    }


def variants(
    base: EngineConfig, speculation: Mapping[str, Mapping[str, Any] | None]
) -> dict[str, EngineConfig]:
    """A configuration with each of these speculative_configs.

    Prompts are not cached: variants that come later must not profit from one that is computed.
    """
    base = replace(base, cache=replace(base.cache, enable_prefix_caching=False))
    return {
        name: replace(base, speculation=parse_speculative_config(values))
        for name, values in speculation.items()
    }


def complete_in_turn(
    engines: Mapping[str, Engine],
    warm_up: str,
    prompts: Sequence[str],
    params: Sequence[SamplingParams],
    on_done: Callable[[], object] = lambda: None,
    on_step: Callable[[str, RequestOutput], object] = lambda name, output: None,
) -> dict[str, list[Sample]]:
    """Complete every prompt with every engine, one request at a time.

    Args:
        warm_up: completed first by every engine and not measured: threads and memory come with it.
            Not one of the prompts, since a proposer may remember it.
        params: of each prompt, whichever engine completes it.
        on_done: called whenever a request is done, warm-ups included.
        on_step: called with the name of an engine and its output that grew; its time is not
            counted.
    """
    assert warm_up not in prompts
    for engine in engines.values():
        complete_alone(engine, "warm-up", warm_up, params[0])
        on_done()
    samples: dict[str, list[Sample]] = {name: [] for name in engines}
    for number, (prompt, chosen) in enumerate(zip(prompts, params, strict=True)):
        for name, engine in engines.items():
            shown = partial(on_step, name)
            samples[name].append(_sample(engine, str(number), prompt, chosen, shown))
            on_done()
    return samples


def are_identical(samples: Samples, base: Samples) -> bool:
    """True if another engine gave the same tokens of each prompt."""
    return [one.token_ids for one in samples] == [one.token_ids for one in base]


def median_tokens_per_s(samples: Samples) -> float:
    """Tokens a second of the median prompt."""
    return statistics.median(sample.tokens_per_s for sample in samples)


def median_ratio(samples: Samples, base: Samples) -> float:
    """Median ratio of tokens a second to those of another engine, prompt by prompt."""
    pairs = zip(samples, base, strict=True)
    ratios = [own.tokens_per_s / other.tokens_per_s for own, other in pairs if other.tokens_per_s]
    return statistics.median(ratios) if ratios else 0.0


def acceptance_length(samples: Samples) -> float:
    """Tokens a verified draft brought, over all prompts; vLLM's formula."""
    num_drafts = sum(sample.stats.num_drafts for sample in samples)
    return 1 + sum(sample.stats.num_accepted_tokens for sample in samples) / max(1, num_drafts)


def acceptance_rate(samples: Samples) -> float:
    """Accepted per drafted token, over all prompts."""
    num_drafted = sum(sample.stats.num_draft_tokens for sample in samples)
    return sum(sample.stats.num_accepted_tokens for sample in samples) / max(1, num_drafted)


def ms_per_step(samples: Samples, seconds: Callable[[StatsTotal], float]) -> float:
    """Median over the prompts of one phase's time a step."""
    return statistics.median(
        1e3 * seconds(sample.stats) / max(1, sample.stats.num_steps) for sample in samples
    )


def _sample(
    engine: Engine,
    request_id: str,
    prompt: str,
    params: SamplingParams,
    shown: Callable[[RequestOutput], object],
) -> Sample:
    stats = StatsTotal()

    def count_from_now(output: RequestOutput) -> None:
        engine.on_step = stats.add
        shown(output)

    try:
        done = complete_alone(engine, request_id, prompt, params, count_from_now)
    finally:
        engine.on_step = None
    one = done.output.outputs[0]
    return Sample(one.token_ids, done.num_decoded, done.decode_s, stats, one.origins)


def method_configs(
    target: Path, drafter: Path, heads: Mapping[str, Path], dtype: str = "float32"
) -> dict[str, EngineConfig]:
    """The engines to compare, plain decoding first, the most elaborate one last.

    Each drafts in every step as much as it may: a controller would draft little where a method does
    not pay, and the comparison would show the controller.

    Args:
        heads: by method.
    """
    model = {"model": str(drafter), "num_speculative_tokens": NUM_DRAFTS}
    speculation: dict[str, dict[str, Any] | None] = {
        PLAIN: None,
        "draft_model": {"method": "draft_model", **model},
        **{
            method: {"method": method, **model, "model": str(head)}
            for method, head in heads.items()
        },
        "suffix": {"method": "suffix"},
        "ngram": {"method": "ngram", "num_speculative_tokens": NUM_DRAFTS},
        "combined": {"method": "combined", **model},
    }
    scheduler = SchedulerConfig(max_num_seqs=1)
    base = EngineConfig(model=str(target), dtype=dtype, device="cpu", scheduler=scheduler)
    fixed = {name: values and values | {"control": "fixed"} for name, values in speculation.items()}
    return variants(base, fixed)


def as_json(compared: Mapping[str, Samples]) -> dict[str, Any]:
    """The numbers of a comparison: plain decoding, and each method against it.

    Speeds are over all prompts, after their first tokens.
    """
    speeds = {name: _speed(samples) for name, samples in compared.items()}
    plain, base = compared[PLAIN], speeds[PLAIN]["tokens_per_s"]
    methods = {
        name: {
            **speeds[name],
            "acceptance_rate": acceptance_rate(samples),
            "acceptance_length": acceptance_length(samples),
            "speedup": speeds[name]["tokens_per_s"] / base if base else 0.0,
            "identical": are_identical(samples, plain),
        }
        for name, samples in compared.items()
        if name != PLAIN
    }
    return {PLAIN: speeds[PLAIN], "methods": methods}


def _speed(samples: Samples) -> dict[str, float]:
    decode_s = sum(sample.decode_s for sample in samples)
    num_decoded = sum(sample.num_decoded for sample in samples)
    return {
        "tokens_per_s": num_decoded / decode_s if decode_s else 0.0,
        "tpot_ms": 1000 * decode_s / max(1, num_decoded),
    }


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
            result[name][temperature_key(temperature)] = {
                "acceptance_length": acceptance_length(own),
                **{
                    f"{phase}_ms": ms_per_step(own, attrgetter(f"{phase}_s"))
                    for phase in ("draft", "verify", "sample", "host")
                },
                "tokens_per_s": median_tokens_per_s(own),
                "ratio_to_plain": median_ratio(own, samples[PLAIN]),
            }
            if temperature == 0:
                result[name]["identical"] = are_identical(own, samples[PLAIN])
    plain, target = result.pop(PLAIN), models[PLAIN]
    plain |= {
        "weight_bytes": target.target.memory_bytes,
        "kv_bytes_per_1k_tokens": _per_1k_tokens(
            configs[PLAIN], lambda size: cache_bytes(target.target.shard, size, target.target.dtype)
        ),
    }
    del plain["identical"]
    return {
        "model_id": configs[PLAIN].model,
        "dtype": dtype_name(target.target.dtype),
        "device": str(target.device),
        "num_prompts": len(prompts),
        "max_tokens": max_tokens,
        "all_identical": all(one["identical"] for one in result.values()),
        PLAIN: plain,
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


def time_drafts(
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
            DraftAsk(str(i), text[:length], HOST_DRAFT_TOKENS)
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
    text = phrases_text(rng, phrases, LONG_CONTEXT + 5 * HOST_STEPS + 5)
    return statistics.median(time_drafts(propose, [text], LONG_CONTEXT, HOST_STEPS)["times_us"][1:])
