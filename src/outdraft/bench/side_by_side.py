"""Several engines over one target, which complete the same prompts in turn.

Prompt by prompt all engines take their turn, so that a machine whose speed drifts treats them
alike; what is compared is compared prompt by prompt.
"""

import statistics
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from outdraft.bench.driver import complete_alone
from outdraft.config.engine import EngineConfig, SchedulerConfig
from outdraft.config.speculation_json import parse_speculative_config
from outdraft.core.errors import ConfigError
from outdraft.core.outputs import RequestOutput, TokenOrigin
from outdraft.core.sampling import SamplingParams
from outdraft.engine.build import build_engine
from outdraft.engine.engine import Engine
from outdraft.engine.stats import StatsTotal
from outdraft.loading.memory import device_memory, plan_together
from outdraft.loading.models import LoadedModels, load_models, with_drafter

Name = TypeVar("Name", bound=Hashable)

PLAIN = "plain"  # decoding without drafts, with which everything is compared
NUM_DRAFTS = 4  # a step, of the methods that `method_configs` compares, but for suffix lookup


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt that one engine completed."""

    token_ids: list[int]
    num_decoded: int  # tokens after the first ones
    decode_s: float  # time inside of the steps that made them
    stats: StatsTotal  # of those steps; the prompt's own is left out
    origins: Sequence[TokenOrigin] = ()

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


def compare(
    engines: Mapping[str, Engine],
    warm_up: str,
    prompts: Sequence[str],
    max_tokens: int,
    temperature: float,
    on_step: Callable[[str, RequestOutput], None],
) -> dict[str, list[Sample]]:
    """Complete every prompt with every engine, one request at a time.

    Each prompt has a seed, so that every engine has to give the same tokens at any temperature.

    Args:
        warm_up: completed first by every engine and not counted. Not one of the prompts, since a
            proposer may remember it.
        on_step: called with the name of an engine and its output that grew; its time is not
            counted.
    """
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number)
        for number in range(len(prompts))
    ]
    return complete_in_turn(engines, warm_up, prompts, params, on_step=on_step)


def as_json(compared: Mapping[str, Samples]) -> dict[str, Any]:
    """The numbers of a comparison: plain decoding, and each method against it."""
    plain = compared[PLAIN]
    methods: dict[str, dict[str, float | bool]] = {
        name: {
            "tokens_per_s": tokens_per_s(samples),
            "tpot_ms": tpot_ms(samples),
            "acceptance_rate": acceptance_rate(samples),
            "acceptance_length": acceptance_length(samples),
            "speedup": speedup(samples, plain),
            "identical": are_identical(samples, plain),
        }
        for name, samples in compared.items()
        if name != PLAIN
    }
    return {
        PLAIN: {"tokens_per_s": tokens_per_s(plain), "tpot_ms": tpot_ms(plain)},
        "methods": methods,
    }


def tokens_per_s(samples: Samples) -> float:
    """Tokens a second over all prompts, after their first tokens."""
    decode_s = sum(sample.decode_s for sample in samples)
    return sum(sample.num_decoded for sample in samples) / decode_s if decode_s else 0.0


def tpot_ms(samples: Samples) -> float:
    """Milliseconds per output token after the first."""
    num_decoded = sum(sample.num_decoded for sample in samples)
    return 1000 * sum(sample.decode_s for sample in samples) / max(1, num_decoded)


def speedup(samples: Samples, plain: Samples) -> float:
    """Tokens a second as a multiple of plain decoding's, over all prompts."""
    base = tokens_per_s(plain)
    return tokens_per_s(samples) / base if base else 0.0
