"""The same prompts with and without speculation: what it changes in speed, and nothing else.

Every method has an engine of its own; the engines share the weights. Prompt by prompt all methods
take their turn, so that a machine whose speed drifts treats them alike.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from outdraft.bench.side_by_side import (
    PLAIN,
    Sample,
    acceptance_length,
    acceptance_rate,
    complete_in_turn,
)
from outdraft.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from outdraft.config.speculation_json import parse_speculative_config
from outdraft.core.outputs import RequestOutput, TokenOrigin
from outdraft.core.sampling import SamplingParams
from outdraft.engine.engine import Engine

NUM_DRAFTS = 4  # a step, of everything but suffix lookup

OnStep = Callable[[str, RequestOutput], None]


@dataclass(frozen=True, slots=True)
class Tally:
    """The prompts that one method completed, added up."""

    samples: Sequence[Sample]

    @property
    def token_ids(self) -> list[list[int]]:
        return [sample.token_ids for sample in self.samples]

    @property
    def origins(self) -> Counter[TokenOrigin]:
        return Counter(chain.from_iterable(sample.origins for sample in self.samples))

    @property
    def tokens_per_s(self) -> float:
        decode_s = sum(sample.decode_s for sample in self.samples)
        return sum(sample.num_decoded for sample in self.samples) / decode_s if decode_s else 0.0

    @property
    def tpot_ms(self) -> float:
        """Time per output token behind the first."""
        num_decoded = sum(sample.num_decoded for sample in self.samples)
        return 1000 * sum(sample.decode_s for sample in self.samples) / max(1, num_decoded)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token."""
        return acceptance_rate(self.samples)

    @property
    def acceptance_length(self) -> float:
        """Tokens a step that verified drafts, its bonus or recovered token included."""
        return acceptance_length(self.samples)


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
    return {
        name: EngineConfig(
            model=str(target),
            dtype=dtype,
            device="cpu",
            # Methods that come later must not profit from a prompt that is computed already.
            cache=CacheConfig(enable_prefix_caching=False),
            scheduler=SchedulerConfig(max_num_seqs=1),
            speculation=parse_speculative_config(values and values | {"control": "fixed"}),
        )
        for name, values in speculation.items()
    }


def compare(
    engines: Mapping[str, Engine],
    warm_up: str,
    prompts: Sequence[str],
    max_tokens: int,
    temperature: float,
    on_step: OnStep,
) -> dict[str, Tally]:
    """Complete every prompt with every engine, one request at a time.

    Each prompt has a seed, so that every engine has to give the same tokens at any temperature.

    Args:
        warm_up: completed first by every engine and not counted. Not one of the prompts, since a
            proposer may remember it.
        on_step: told which engine's output grew; the time it takes is not counted.
    """
    params = [
        SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=number)
        for number in range(len(prompts))
    ]
    samples = complete_in_turn(engines, warm_up, prompts, params, on_step=on_step)
    return {name: Tally(own) for name, own in samples.items()}


def as_json(tallies: Mapping[str, Tally]) -> dict[str, object]:
    """The numbers of a comparison: plain decoding, and each method against it."""
    plain = tallies[PLAIN]
    methods: dict[str, dict[str, float | bool]] = {
        name: {
            "tokens_per_s": tally.tokens_per_s,
            "tpot_ms": tally.tpot_ms,
            "acceptance_rate": tally.acceptance_rate,
            "acceptance_length": tally.acceptance_length,
            "speedup": speedup(tally, plain),
            "identical": tally.token_ids == plain.token_ids,
        }
        for name, tally in tallies.items()
        if name != PLAIN
    }
    return {
        PLAIN: {"tokens_per_s": plain.tokens_per_s, "tpot_ms": plain.tpot_ms},
        "methods": methods,
    }


def speedup(tally: Tally, plain: Tally) -> float:
    """How many times as many tokens a second."""
    return tally.tokens_per_s / plain.tokens_per_s if plain.tokens_per_s else 0.0


def all_identical(tallies: Mapping[str, Tally]) -> bool:
    """Whether no method changed a single token."""
    return all(tally.token_ids == tallies[PLAIN].token_ids for tally in tallies.values())
