"""The same prompts with and without speculation: what it changes in speed, and nothing else.

Every method has an engine of its own; the engines share the weights. Prompt by prompt all methods
take their turn, so that a machine whose speed drifts treats them alike.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from outdraft.bench.alone import complete_alone
from outdraft.bench.side_by_side import PLAIN
from outdraft.config.engine import CacheConfig, EngineConfig, SchedulerConfig
from outdraft.config.speculation_json import parse_speculative_config
from outdraft.core.outputs import RequestOutput, TokenOrigin
from outdraft.core.sampling import SamplingParams
from outdraft.engine.engine import Engine

NUM_DRAFTS = 4  # a step, of everything but suffix lookup

OnStep = Callable[[str, RequestOutput], None]
Measured = dict[str, float | bool]


@dataclass(slots=True)
class Tally:
    """Sums over the prompts that one method completed.

    Attributes:
        num_decoded: tokens behind each prompt's first one.
        decode_s: time inside of steps behind the first token: no prompt, no printing.
    """

    token_ids: list[list[int]] = field(default_factory=list[list[int]])
    origins: Counter[TokenOrigin] = field(default_factory=Counter[TokenOrigin])
    num_decoded: int = 0
    decode_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_spec_steps: int = 0

    def add(self, output: RequestOutput, num_decoded: int, decode_s: float) -> None:
        """Book one finished prompt."""
        completion = output.outputs[0]
        speculation = output.metrics.speculative_decoding
        self.token_ids.append(list(completion.token_ids))
        self.origins.update(completion.origins)
        self.num_decoded += num_decoded
        self.decode_s += decode_s
        self.num_drafted += speculation.num_draft_tokens
        self.num_accepted += speculation.num_accepted_draft_tokens
        self.num_spec_steps += speculation.num_spec_steps

    @property
    def tokens_per_s(self) -> float:
        return self.num_decoded / self.decode_s if self.decode_s else 0.0

    @property
    def tpot_ms(self) -> float:
        """Time per output token behind the first."""
        return 1000 * self.decode_s / max(1, self.num_decoded)

    @property
    def acceptance_rate(self) -> float:
        """Accepted per drafted token."""
        return self.num_accepted / max(1, self.num_drafted)

    @property
    def acceptance_length(self) -> float:
        """Tokens a step that verified drafts, its bonus or recovered token included."""
        return 1 + self.num_accepted / max(1, self.num_spec_steps)


def method_configs(
    target: Path, drafter: Path, heads: Mapping[str, Path], dtype: str = "float32"
) -> dict[str, EngineConfig]:
    """The engines to compare, plain decoding first, the most elaborate one last.

    Args:
        heads: by method.
    """
    model = {"model": str(drafter), "num_speculative_tokens": NUM_DRAFTS}
    speculation = {
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
            speculation=parse_speculative_config(values),
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
        warm_up: completed first by every engine and not counted: kernels compile at their first
            call. Not one of the prompts, since a proposer may remember it.
        on_step: told which engine's output grew; the time it takes is not counted.
    """
    assert warm_up not in prompts
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=len(prompts))
    for engine in engines.values():
        complete_alone(engine, "warm-up", warm_up, params, lambda output: None)
    tallies = {name: Tally() for name in engines}
    for number, prompt in enumerate(prompts):
        params = replace(params, seed=number)
        for name, engine in engines.items():

            def shown(output: RequestOutput, name: str = name) -> None:
                on_step(name, output)

            tallies[name].add(*complete_alone(engine, str(number), prompt, params, shown))
    return tallies


def as_json(tallies: Mapping[str, Tally]) -> dict[str, object]:
    """The numbers of a comparison: plain decoding, and each method against it."""
    plain = tallies[PLAIN]
    methods: dict[str, Measured] = {
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
