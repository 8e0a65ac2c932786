"""The best way to draft for one model, on this machine and for this traffic.

All candidates and plain decoding complete the same prompts in turn. After the first round only
those go on that are almost as fast as the best. Costs and gains of a fixed draft of few tokens
explain why speculation does not pay where it does not.
"""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from outdraft.bench.side_by_side import PLAIN
from outdraft.bench.sweep import LevelResult, Sweep
from outdraft.bench.workloads import BenchRequest
from outdraft.config.benchmarks import PROBE_LENGTH
from outdraft.engine.stats import StatsTotal

FAR_BEHIND = 0.10  # of the best speed
WORTH_IT = 0.01  # gain over plain decoding, and of fixed lengths over those that adapt
OFTEN = 0.9  # of the steps; drafting in fewer is named as a reason
GROWN = 1.25  # times the target's plain pass: rows are no longer free


@dataclass(frozen=True, slots=True)
class Balance:
    """Gains and costs of fixed drafts at one concurrency, in steps of plain decoding.

    Attributes:
        length: tokens that a step brings, its own one included.
        verifying: the target's pass with drafts, and
        step: the whole step, as multiples of plain decoding's whole step.
        drafting: the share of it for drafting.
        intensity: operations for each byte of weights that the target's pass reads, and
        ridge: how many the machine does in the time of a byte; None: unknown.
        share: of the steps in which a request had a draft; a source of the host may find none.
    """

    length: float
    verifying: float
    drafting: float
    step: float
    intensity: float
    ridge: float | None = None
    share: float = 1.0

    @property
    def break_even_chance(self) -> float:
        """The chance that each token must have for drafts to pay; infinite if none is enough."""

        def pays(chance: float) -> bool:
            accepted = sum(chance**level for level in range(1, PROBE_LENGTH + 1))
            return 1 + self.share * accepted >= self.step

        low, high = 0.0, 1.0
        if not pays(high):
            return math.inf
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high

    @property
    def reason(self) -> str | None:
        """Why these drafts do not pay; None if they do."""
        if self.length > self.step:
            return None
        if self.length > self.step - self.drafting:
            return f"the drafter is too slow: it takes {self.drafting:.0%} of a plain step"
        if self.verifying > GROWN:
            ridge = "" if self.ridge is None else f", the machine's ridge point is {self.ridge:.0f}"
            return (
                f"the target is already compute-bound: a pass with drafts takes "
                f"{self.verifying:.2f} plain ones ({self.intensity:.0f} operations a byte{ridge})"
            )
        if self.break_even_chance > 1:
            if self.share < OFTEN:
                return f"drafts are too rare: {self.share:.0%} of the steps have one"
            return f"the drafter is too slow: it takes {self.drafting:.0%} of a plain step"
        rare = f", and {self.share:.0%} of the steps have a draft" if self.share < OFTEN else ""
        return f"acceptance is too low: a step brings {self.length:.2f} tokens{rare}"


def race(sweep: Sweep, requests: Sequence[BenchRequest]) -> list[LevelResult]:
    """Measure every level; slow candidates have fewer rounds than the others."""
    results, engines = list(sweep.parts(requests)), sweep.engines(sweep.levels)
    for result, own in zip(results, engines, strict=True):
        sweep.warm_up(own, result)
    running = list(sweep.configs)
    for number in range(sweep.max_rounds):
        for result, own in zip(results, engines, strict=True):
            sweep.run_round({name: own[name] for name in running}, result, number)
        running = survivors(results, running)
        if number + 1 >= sweep.min_rounds and len(running) <= 2:
            break
    return results


def survivors(results: Sequence[LevelResult], running: Sequence[str]) -> list[str]:
    """Plain decoding, and the candidates that are almost as fast as the best."""
    found = {name: gain(results, name) for name in running if name != PLAIN}
    best = max(found.values())
    return [PLAIN, *(name for name, one in found.items() if one >= best * (1 - FAR_BEHIND))]


def gain(results: Sequence[LevelResult], name: str) -> float:
    """Times plain decoding's speed: the geometric mean over the levels."""
    return math.exp(sum(math.log(level_gain(one, name)) for one in results) / len(results))


def level_gain(result: LevelResult, name: str) -> float:
    """Times plain decoding's speed: the median of the rounds that both ran."""
    pairs = zip(result.rates[name], result.rates[PLAIN], strict=False)
    return median(own / plain for own, plain in pairs)


def winner(results: Sequence[LevelResult], names: Collection[str], fixed: Collection[str]) -> str:
    """The fastest. A fixed length must be clearly faster than all that adapt, since those fit other
    traffic, too."""
    best = max(names, key=lambda name: gain(results, name))
    adaptive = max((n for n in names if n not in fixed), key=lambda name: gain(results, name))
    is_clear = gain(results, best) > gain(results, adaptive) * (1 + WORTH_IT)
    return best if is_clear else adaptive


def balance(
    plain: StatsTotal, fixed: StatsTotal, level: int, row_intensity: float, ridge: float | None
) -> Balance:
    """Fixed drafts against plain decoding, from the time of their steps.

    row_intensity: operations of a row for each byte of the target's weights.
    """
    # Sums over steps become means, of the fixed drafts' steps by those of plain decoding's.
    steps = max(1, plain.num_steps) / max(1, fixed.num_steps)
    plain_target_s = plain.verify_s + plain.sample_s
    target_s = fixed.verify_s + fixed.sample_s
    plain_s = plain.draft_s + plain_target_s + plain.host_s
    return Balance(
        length=steps * fixed.num_emitted / max(1, plain.num_emitted),
        verifying=steps * target_s / plain_target_s,
        drafting=steps * fixed.draft_s / plain_s,
        step=steps * (fixed.draft_s + target_s + fixed.host_s) / plain_s,
        intensity=level * (1 + PROBE_LENGTH) * row_intensity,
        ridge=ridge,
        share=min(1.0, fixed.num_drafts / max(1, fixed.num_steps) / level),
    )


def config_file(
    model: str | None,
    speculation: Mapping[str, Any] | None,
    disable_above: int | None,
    notes: Sequence[str],
) -> str:
    """TOML for `outdraft serve --config`. Strings, numbers and lists are JSON's in TOML, too.

    model: None: the embedded one, which serves where the file names none.
    """
    lines = [f"# {note}" for note in notes]
    if model is not None:
        lines.append(f"model = {json.dumps(model)}")
    if speculation is None:
        return "\n".join([*lines, 'speculative-config = "null"', ""])
    if disable_above is not None:
        lines.append(f"speculative-disable-queue-size = {disable_above}")
    lines += ["", "[speculative-config]"]
    return "\n".join([*lines, *(f"{key} = {json.dumps(v)}" for key, v in speculation.items()), ""])
