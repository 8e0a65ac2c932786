"""Speculation that chooses its lengths against plain decoding and fixed lengths, by concurrency.

At each level all variants complete the same prompts, which no other level saw, 0.1 s in turn, so
that a machine whose speed drifts treats them alike. The time counts in which as many requests run
as the level says: a variant's part of a round ends when there is none left to begin.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outdraft.bench.driver import EngineRun, queued, take_turns
from outdraft.bench.side_by_side import PLAIN, build_together
from outdraft.bench.workloads import BenchRequest
from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import RejectionMethod
from outdraft.core.sampling import SamplingParams
from outdraft.engine.engine import Engine
from outdraft.engine.stats import StatsTotal
from outdraft.kernels.data.drafts import DraftBatch, Verdict
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.ops import Kernels
from outdraft.loading.models import LoadedModels
from outdraft.runner.model_runner import ModelRunner
from outdraft.sampling.processors import Paths
from outdraft.verification.verifier import Verifier

CHOSEN = "auto"  # the variant that chooses
REQUESTS_PER_PLACE = 3  # of a round,
WARM_UP_PER_PLACE, LEAST_WARM_UP = 2, 8  # and before the first one
RESAMPLES, INTERVAL = 2000, (2.5, 97.5)  # of the bootstrap, percentiles
SPLITS = 200  # of the rounds into halves
GOLDEN = (5**0.5 - 1) / 2  # its multiples, whole parts left out, are spread evenly at any count


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Variants that complete the same prompts side by side, level by level.

    Attributes:
        configs: of the variants, PLAIN among them, and
        models: of each.
        levels: requests that run at once.
        least_requests: that a round completes, also where few run at once: of a few texts, which
            all rounds share, some fixed length is the best by luck.
        tolerance: rounds are added until the ratio's interval is as narrow to either side.
        acceptance: chances that a synthetic draft's token is accepted, request by request in turn;
            None: the target decides.
        on_run: called with a variant's name when it has completed its part of a round.
    """

    configs: Mapping[str, EngineConfig]
    models: Mapping[str, LoadedModels]
    temperature: float
    levels: tuple[int, ...]
    least_requests: int = 24
    min_rounds: int = 3
    max_rounds: int = 12
    tolerance: float = 0.02
    acceptance: tuple[float, ...] | None = None
    on_run: Callable[[str], object] = lambda variant: None

    def num_requests(self, level: int) -> int:
        """Requests of each round."""
        return max(self.least_requests, REQUESTS_PER_PLACE * level)

    def num_warm_up(self, level: int) -> int:
        """Requests before the first round."""
        return max(min(LEAST_WARM_UP, self.least_requests), WARM_UP_PER_PLACE * level)

    @property
    def num_prompts(self) -> int:
        """For all levels, warming up included."""
        return sum(self.num_warm_up(level) + self.num_requests(level) for level in self.levels)

    def parts(self, requests: Sequence[BenchRequest]) -> Iterator["LevelResult"]:
        """Each level without rounds yet, with requests that no other level has."""
        assert len(requests) == self.num_prompts
        left = iter(unequal(requests))
        for level in self.levels:
            yield LevelResult(
                level,
                {name: [] for name in self.configs},
                {name: StatsTotal() for name in self.configs},
                list(islice(left, self.num_warm_up(level))),
                list(islice(left, self.num_requests(level))),
            )

    def measure(self, requests: Sequence[BenchRequest]) -> Iterator["LevelResult"]:
        """Each level when it is measured. `requests`: `num_prompts` different ones."""
        for result in self.parts(requests):
            engines = self.engines([result.concurrency])[0]
            self.warm_up(engines, result)
            while result.num_rounds < self.max_rounds:
                self.run_round(engines, result, result.num_rounds)
                if result.num_rounds >= self.min_rounds and result.is_narrow(self.tolerance):
                    break
            del engines  # those of the next level need their memory
            yield result

    def engines(self, levels: Sequence[int]) -> list[dict[str, Engine]]:
        """An engine for each variant at each level; all of them share the memory."""
        configs = {
            (level, name): replace(one, scheduler=replace(one.scheduler, max_num_seqs=level))
            for level in levels
            for name, one in self.configs.items()
        }
        engines = build_together(configs, {key: self.models[key[1]] for key in configs})
        if self.acceptance is not None:
            for (_, name), engine in engines.items():
                runner, kernels = engine.runner, self.models[name].kernels
                assert isinstance(runner, ModelRunner), "engines that are compared have one rank"
                runner.verifier = SyntheticVerifier(
                    kernels, runner.verifier.method, self.acceptance
                )
        return [{name: engines[level, name] for name in self.configs} for level in levels]

    def warm_up(self, engines: Mapping[str, Engine], result: "LevelResult") -> None:
        """Each engine in turn completes the level's first requests."""
        for name, engine in engines.items():
            with closing(self._run(engine, result.warm_up, result.concurrency)) as run:
                run.advance()
            self.on_run(name)

    def run_round(self, engines: Mapping[str, Engine], result: "LevelResult", number: int) -> None:
        """Each variant completes all requests of a round; they take turns, see `take_turns`."""
        with ExitStack() as stack:
            runs: dict[str, EngineRun] = {}
            for name, engine in engines.items():
                stats = result.stats[name]
                run = self._run(engine, result.of_round, result.concurrency, stats)
                runs[name] = stack.enter_context(closing(run))
            take_turns(runs, number, self.on_run)
            for name, run in runs.items():
                result.rates[name].append(run.tokens_per_s)

    def _run(
        self,
        engine: Engine,
        requests: Sequence[BenchRequest],
        level: int,
        stats: StatsTotal | None = None,
    ) -> EngineRun:
        """The time counts in which `level` requests run; the rest of the last ones is left out."""
        params = SamplingParams(temperature=self.temperature, ignore_eos=True, detokenize=False)
        queue = queued(requests, params)
        return EngineRun(engine, queue, num_together=level, stats=stats)


def unequal(requests: Sequence[BenchRequest]) -> list[BenchRequest]:
    """Shorten requests so that they ask for half of their tokens up to all of them.

    Requests of one length that begin together end together with plain decoding, which gives each a
    token a step: it alone would read its prompts in one pass.
    """
    shares = [1 - (number * GOLDEN) % 1 / 2 for number in range(len(requests))]
    return [
        replace(request, max_tokens=math.ceil(share * request.max_tokens))
        for request, share in zip(requests, shares, strict=True)
    ]


@dataclass(slots=True)
class LevelResult:
    """One level.

    Attributes:
        rates: tokens a second of each variant, round by round.
        warm_up: requests before the first round.
        of_round: requests of each round.
    """

    concurrency: int
    rates: dict[str, list[float]]
    stats: dict[str, StatsTotal]
    warm_up: Sequence[BenchRequest] = ()
    of_round: Sequence[BenchRequest] = ()

    @property
    def num_rounds(self) -> int:
        return len(self.rates[PLAIN])

    @property
    def best(self) -> str:
        """The fastest variant that does not choose, by its median."""
        return max((n for n in self.rates if n != CHOSEN), key=lambda n: median(self.rates[n]))

    def ratio_to(self, other: str) -> dict[str, float]:
        """The chosen lengths' speed as a multiple of another variant's: the rounds' median, and its
        interval from `low` to `high`."""
        pairs = zip(self.rates[CHOSEN], self.rates[other], strict=True)
        ratios = [own / base for own, base in pairs]
        low, high = median_interval(ratios)
        return {"median": median(ratios), "low": low, "high": high}

    def is_narrow(self, tolerance: float) -> bool:
        """True if the interval of the ratio to the best is at most as wide to either side."""
        ratio = self.ratio_to(self.best)
        return ratio["high"] - ratio["low"] <= 2 * tolerance


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """A 95 % interval of the median, by the bootstrap of percentiles; the same at every call."""
    drawn = np.random.default_rng(0).choice(np.array(values), (RESAMPLES, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), INTERVAL).tolist()
    return low, high


def split_half_ratio(rates: Mapping[str, Sequence[float]]) -> float | None:
    """The chosen lengths' speed over the best other variant's, where other rounds say who that is.

    The variant with the largest of several noisy medians looks faster than it is. Here one half of
    the rounds names it and the other half measures it: the mean of both ways, over random halves
    that are the same at every call. As half of the rounds may name one that is not the best, the
    truth lies, on average, between this ratio and the one to the best of all rounds.

    rates: tokens a second by variant, round by round; None if there are fewer than two rounds.
    """
    others = [name for name in rates if name != CHOSEN]
    rates_VR = np.array([rates[name] for name in others])
    ratios_VR = np.array(rates[CHOSEN]) / rates_VR
    num_rounds = rates_VR.shape[1]
    if num_rounds < 2:
        return None
    generator, found = np.random.default_rng(0), list[float]()
    for _ in range(SPLITS):
        order = generator.permutation(num_rounds)
        halves = order[: num_rounds // 2], order[num_rounds // 2 :]
        for naming, measuring in (halves, halves[::-1]):
            named = np.median(rates_VR[:, naming], axis=1).argmax()
            found.append(float(np.median(ratios_VR[named, measuring])))
    return float(np.mean(found))


def level_report(result: LevelResult, tolerance: float) -> dict[str, Any]:
    """A level for tables and files."""
    return {
        "concurrency": result.concurrency,
        "num_rounds": result.num_rounds,
        "best": result.best,
        "ratio_to_best": result.ratio_to(result.best),
        "split_half_ratio": split_half_ratio(result.rates),
        "ratio_to_plain": result.ratio_to(PLAIN),
        "is_narrow": result.is_narrow(tolerance),
        "variants": {
            name: {
                "tokens_per_s": median(rates),
                "rounds": rates,
                "acceptance_length": result.stats[name].acceptance_length,
                "draft_tokens_per_step": result.stats[name].num_draft_tokens
                / max(1, result.stats[name].num_steps),
            }
            for name, rates in result.rates.items()
        },
    }


class SyntheticVerifier(Verifier):
    """A verifier that works as another one does, for its cost, then keeps what coins say.

    Speculation's gain hangs on how often drafts are right, which random weights cannot show.
    The chance of each token of a draft, given those before it, is one of `chances`; which of them
    hangs on the request alone. Drafts must be chains, requests must not all be greedy: greedy
    batches are matched without a verifier.
    """

    def __init__(self, kernels: Kernels, method: RejectionMethod, chances: Sequence[float]) -> None:
        super().__init__(kernels, method)
        self._chances = torch.tensor(chances)
        self._coins = torch.Generator().manual_seed(0)

    @property
    def rule(self) -> None:
        """No operation keeps what coins say."""

    def verify(
        self, logits_RV: Tensor, drafts: DraftBatch, sampling: SamplingBatch, committed: Paths
    ) -> Verdict:
        verdict = super().verify(logits_RV, drafts, sampling, committed)
        if not drafts.is_chain:
            raise ValueError("synthetic acceptance is of chains")
        device = logits_RV.device
        chance_B1 = self._chances[sampling.seeds_B.cpu() % len(self._chances)][:, None].to(device)
        coins_BN = torch.rand(drafts.token_ids_BN.shape, generator=self._coins).to(device)
        is_kept_BN = ((coins_BN < chance_B1) & drafts.is_draft_BN).long().cumprod(1).bool()
        num_kept_B1 = is_kept_BN.sum(1, keepdim=True)
        ids_BN1 = torch.cat([drafts.token_ids_BN, torch.full_like(num_kept_B1, -1)], 1)
        place_N1 = torch.arange(ids_BN1.shape[1], device=device)
        ids_BN1 = ids_BN1.masked_fill(place_N1 >= num_kept_B1, -1)
        ids_BN1 = ids_BN1.scatter(1, num_kept_B1, verdict.token_ids_BN1[:, :1])
        rows_BN = place_N1[:-1].expand_as(is_kept_BN).masked_fill(~is_kept_BN, -1)
        return Verdict(ids_BN1, num_kept_B1[:, 0] + 1, rows_BN)
