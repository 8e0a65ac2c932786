"""The same prompts with and without speculation: what it changes in speed, and nothing else.

Every method has an engine of its own; the engines share the weights. Prompt by prompt all methods
take their turn, so that a machine whose speed drifts treats them alike.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outdraft.bench.side_by_side import (
    PLAIN,
    Sample,
    acceptance_length,
    acceptance_rate,
    are_identical,
    complete_in_turn,
)
from outdraft.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from outdraft.config.speculation_json import parse_speculative_config
from outdraft.core.outputs import RequestOutput
from outdraft.core.sampling import SamplingParams
from outdraft.engine.engine import Engine

NUM_DRAFTS = 4  # a step, of everything but suffix lookup

Samples = Sequence[Sample]  # the prompts that one method completed


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
    on_step: Callable[[str, RequestOutput], None],
) -> dict[str, list[Sample]]:
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
    return complete_in_turn(engines, warm_up, prompts, params, on_step=on_step)


def as_json(compared: Mapping[str, Samples]) -> dict[str, object]:
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
    """Over all prompts, behind their first tokens."""
    decode_s = sum(sample.decode_s for sample in samples)
    return sum(sample.num_decoded for sample in samples) / decode_s if decode_s else 0.0


def tpot_ms(samples: Samples) -> float:
    """Time per output token behind the first."""
    num_decoded = sum(sample.num_decoded for sample in samples)
    return 1000 * sum(sample.decode_s for sample in samples) / max(1, num_decoded)


def speedup(samples: Samples, plain: Samples) -> float:
    """How many times as many tokens a second."""
    base = tokens_per_s(plain)
    return tokens_per_s(samples) / base if base else 0.0
