"""Several engines over one target, which complete the same prompts in turn.

Prompt by prompt all engines take their turn, so that a machine whose speed drifts treats them
alike; what is compared is compared prompt by prompt.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.core.outputs import RequestOutput, TokenOrigin
from outdraft.core.sampling import SamplingParams
from outdraft.engine.assembly import Assembler, checked
from outdraft.engine.build import build_engine
from outdraft.engine.engine import Engine
from outdraft.engine.inputs import Prompt
from outdraft.engine.stats import StatsTotal
from outdraft.loading.memory import device_memory
from outdraft.loading.memory_plan import plan_together
from outdraft.loading.models import LoadedModels, load_models, with_drafter

PLAIN = "plain"  # decoding without drafts, with which everything is compared


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt that one engine completed."""

    token_ids: list[int]
    num_decoded: int  # tokens behind the first ones
    decode_s: float  # time inside of the steps that made them
    stats: StatsTotal  # of those steps; the prompt's own is left out
    origins: Sequence[TokenOrigin] = ()

    @property
    def tokens_per_s(self) -> float:
        return self.num_decoded / self.decode_s if self.decode_s else 0.0


class SharedModels:
    """One target for many configurations, and each network that drafts once."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[object, ...], LoadedModels] = {}

    def of(self, config: EngineConfig) -> LoadedModels:
        """What the configuration needs; what is not there yet is loaded.

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


def build_together(parts: Sequence[tuple[EngineConfig, LoadedModels]]) -> list[Engine]:
    """Engines that live at once and share the memory, see `plan_together`.

    Raises:
        ConfigError: one of them cannot be built, or there is too little memory for them.
    """
    plans = plan_together(parts, device_memory(parts[0][1].device))
    return [build_engine(*part, plan)[0] for part, plan in zip(parts, plans, strict=True)]


class Completion:
    """A prompt that an engine completes alone, step by step.

    Attributes:
        decode_s: time inside of the steps behind the one that brought the first tokens.
        shown: is told when the output grew; the time it takes is not counted.
    """

    def __init__(
        self,
        engine: Engine,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams,
        shown: Callable[[RequestOutput], object] = lambda output: None,
    ) -> None:
        self._steps = Assembler(engine).run([(request_id, prompt, params, 0)])
        self._shown = shown
        self._output: RequestOutput | None = None
        self._num_first = 0
        self.is_over, self.decode_s = False, 0.0

    @property
    def output(self) -> RequestOutput:
        """As far as it came.

        Raises:
            GenerationError: it failed while it ran.
        """
        return checked(self._output)

    @property
    def num_decoded(self) -> int:
        """Tokens behind the first ones."""
        return len(self.output.outputs[0].token_ids) - self._num_first

    def advance(self, seconds: float) -> None:
        """As Run."""
        passed_s = 0.0
        while not self.is_over and passed_s < seconds:
            started_s = perf_counter()
            outputs = next(self._steps, None)
            step_s = perf_counter() - started_s
            passed_s += step_s
            self.is_over = outputs is None
            for changed in outputs or ():
                if self._output is None:
                    self._num_first = len(changed.outputs[0].token_ids)
                else:
                    self.decode_s += step_s
                self._output = changed
                self._shown(changed)


def complete_alone(
    engine: Engine,
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    shown: Callable[[RequestOutput], object] = lambda output: None,
) -> Completion:
    """Complete a prompt to its end.

    Raises:
        GenerationError: it failed while it ran.
    """
    completion = Completion(engine, request_id, prompt, params, shown)
    completion.advance(math.inf)
    assert completion.output.finished
    return completion


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
        on_step: told which engine's output grew; the time it takes is not counted.
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


def are_identical(samples: Sequence[Sample], base: Sequence[Sample]) -> bool:
    """Whether another engine gave the same tokens of each prompt."""
    return [one.token_ids for one in samples] == [one.token_ids for one in base]


def median_tokens_per_s(samples: Sequence[Sample]) -> float:
    """Tokens a second of the median prompt."""
    return statistics.median(sample.tokens_per_s for sample in samples)


def median_ratio(samples: Sequence[Sample], base: Sequence[Sample]) -> float:
    """How many times as many tokens a second as another engine, prompt by prompt."""
    pairs = zip(samples, base, strict=True)
    ratios = [own.tokens_per_s / other.tokens_per_s for own, other in pairs if other.tokens_per_s]
    return statistics.median(ratios) if ratios else 0.0


def acceptance_length(samples: Sequence[Sample]) -> float:
    """Tokens a verified draft brought, over all prompts; vLLM's formula."""
    num_drafts = sum(sample.stats.num_drafts for sample in samples)
    return 1 + sum(sample.stats.num_accepted_tokens for sample in samples) / max(1, num_drafts)


def acceptance_rate(samples: Sequence[Sample]) -> float:
    """Accepted per drafted token, over all prompts."""
    num_drafted = sum(sample.stats.num_draft_tokens for sample in samples)
    return sum(sample.stats.num_accepted_tokens for sample in samples) / max(1, num_drafted)


def ms_per_step(samples: Sequence[Sample], seconds: Callable[[StatsTotal], float]) -> float:
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
