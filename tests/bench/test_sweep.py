"""A sweep gives every variant the same requests, other ones at each level, for long enough."""

import gc
import json
from collections import Counter
from itertools import pairwise, permutations
from unittest.mock import create_autospec

import pytest
import torch

from outdraft.bench import driver
from outdraft.bench.side_by_side import PLAIN, share_target
from outdraft.bench.sweep import (
    CHOSEN,
    LevelResult,
    Sweep,
    SyntheticVerifier,
    level_report,
    median_interval,
    split_half_ratio,
    unequal,
)
from outdraft.bench.workloads import BenchRequest
from outdraft.cli.bench_sweep import plot, variants
from outdraft.config.engine import EngineConfig
from outdraft.core.draft import Draft
from outdraft.core.sampling import SamplingParams
from outdraft.engine.engine import Engine
from outdraft.engine.stats import StatsTotal
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.sampling import Paths
from outdraft.kernels.torch.table import reference_kernels
from tests.cli.pair import pair
from tests.sampling_batches import batch_of_params

VOCAB = 11


def synthetic_verdict(chances, lengths, seeds):
    verifier = SyntheticVerifier(reference_kernels(), "block", chances)
    drafts = DraftBatch.from_drafts([Draft.chain(range(n)) for n in lengths], "cpu")
    sampling = batch_of_params(
        [SamplingParams(temperature=1.0)] * len(lengths),
        seeds=seeds,
        vocab_size=VOCAB,
        device="cpu",
    )
    zeros_B = torch.zeros(len(lengths), dtype=torch.int64)
    logits_RV = torch.zeros(sum(lengths) + len(lengths), VOCAB)
    return verifier.verify(logits_RV, drafts, sampling, Paths(None, zeros_B, zeros_B + 1, None))


@pytest.mark.parametrize(("chance", "kept"), [(0.0, 0), (1.0, 1)])
def test_certain_coins_keep_all_or_nothing_and_add_one_token(chance, kept):
    lengths = [3, 0, 5]
    verdict = synthetic_verdict((chance,), lengths, [1, 2, 3])
    assert verdict.num_emitted_B.tolist() == [kept * n + 1 for n in lengths]
    for ids, rows, n in zip(verdict.token_ids_BN1, verdict.rows_BN, lengths, strict=True):
        num = kept * n
        assert ids[:num].tolist() == list(range(num))
        assert 0 <= ids[num] < VOCAB
        assert set(ids[num + 1 :].tolist()) <= {-1}
        assert rows.tolist() == [*range(num), *[-1] * (5 - num)]


def test_a_request_has_its_own_chance_and_drafts_fare_accordingly():
    num_each, depth = 4000, 3
    chances = (0.3, 0.8)
    verdict = synthetic_verdict(chances, [depth] * 2 * num_each, list(range(2 * num_each)))
    for place, chance in enumerate(chances):
        mean = (verdict.num_emitted_B[place::2] - 1).double().mean().item()
        expected = sum(chance**i for i in range(1, depth + 1))
        assert mean == pytest.approx(expected, abs=5 * depth / num_each**0.5 / 2)


def test_an_interval_of_a_median_covers_it_as_often_as_it_says():
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(200):
        low, high = median_interval(torch.randn(15, generator=generator).tolist())
        hits += low <= 0 <= high
    assert 0.88 <= hits / 200 <= 0.995
    assert median_interval([2.0] * 5) == (2.0, 2.0)


def test_the_best_of_the_others_is_what_choosing_is_measured_by():
    rates = {PLAIN: [10.0, 11.0, 12.0], "3": [20.0, 22.0, 10.0], CHOSEN: [19.0, 22.0, 12.0]}
    stats = {name: StatsTotal() for name in rates}
    report = level_report(LevelResult(4, rates, stats), 0.02)
    assert report["best"] == "3"
    assert report["ratio_to_best"]["median"] == 1.0
    assert report["ratio_to_plain"]["median"] == 1.9
    assert report["is_narrow"] is False


def test_halves_of_the_rounds_do_not_overstate_the_best_of_many_equals():
    generator = torch.Generator().manual_seed(0)
    names = [PLAIN, "1", "2", "3", "5", "7", CHOSEN]
    best, halves = list[float](), list[float]()
    for _ in range(40):
        drawn = torch.randn(len(names), 12, generator=generator).mul(0.1).exp()
        rates = dict(zip(names, drawn.tolist(), strict=True))
        stats = {name: StatsTotal() for name in names}
        report = level_report(LevelResult(1, rates, stats), 0.02)
        best.append(report["ratio_to_best"]["median"])
        halves.append(report["split_half_ratio"])
    assert sum(best) / len(best) < 0.98
    assert sum(halves) / len(halves) == pytest.approx(1.0, abs=0.015)


def test_halves_find_a_best_that_is_plain_to_see_and_need_two_rounds():
    rates = {PLAIN: [10.0] * 5, "3": [20.0] * 5, CHOSEN: [18.0] * 5}
    assert split_half_ratio(rates) == pytest.approx(0.9)
    assert split_half_ratio({name: one[:1] for name, one in rates.items()}) is None


@pytest.fixture(scope="module")
def configs():
    base = EngineConfig.from_options(model=str(pair().target), device="cpu", max_model_len=64)
    given = {"method": "draft_model", "model": str(pair().drafter)}
    return variants(base, given, [2])


def sweep(configs, **options):
    return Sweep(configs=configs, models=share_target(configs), temperature=0.0, **options)


def requests(plan):
    return [BenchRequest((5, 6, 7 + number), 9) for number in range(plan.num_prompts)]


def test_all_variants_complete_the_same_prompts_and_each_level_others(configs, monkeypatch):
    seen: dict[tuple[int, str], list[tuple[int, ...]]] = {}
    runs: list[str] = []
    plan = sweep(configs, levels=(1, 3), min_rounds=2, max_rounds=2, on_run=runs.append)
    all_requests = requests(plan)
    results = []
    for result in plan.measure(all_requests):
        results.append(result)
        for name, total in result.stats.items():
            seen[result.concurrency, name] = [total.num_emitted, total.num_drafts]
    assert [result.concurrency for result in results] == [1, 3]
    assert [result.num_rounds for result in results] == [2, 2]
    assert len(runs) == 2 * 3 * (1 + 2)
    assert sorted(runs[3:6]) == sorted(runs[6:9]) == sorted(configs)
    for level in plan.levels:
        assert seen[level, PLAIN][1] == 0
        assert seen[level, "2"][1] > 0
    first, num = plan.num_warm_up(1), plan.num_requests(1)
    ran = unequal(all_requests)[first : first + num]
    lengths = [request.max_tokens for request in ran]
    assert seen[1, PLAIN][0] == 2 * sum(lengths)
    assert 9 / 2 <= min(lengths) < max(lengths) <= 9


@pytest.mark.slow
def test_variants_take_turns_within_a_round_and_each_follows_every_other_one(configs, monkeypatch):
    monkeypatch.setattr(driver, "TURN_S", 1e-9)  # a turn is a step
    plan = sweep(configs, levels=(2,))
    engines = plan.engines([2])[0]
    result = next(plan.parts(requests(plan)))
    order: list[str] = []
    for name, total in result.stats.items():
        log = create_autospec(total, instance=True)
        log.add.side_effect = lambda step, name=name: order.append(name)
        result.stats[name] = log
    names, firsts, follows = list(configs), set[str](), Counter[tuple[str, str]]()
    for number in range(40):
        order.clear()
        plan.run_round(engines, result, number)
        firsts.add(order[0])
        for start in range(0, 9, 3):  # while all of them run
            assert sorted(order[start : start + 3]) == sorted(names)
        follows.update(pairwise(order[:9]))
    assert firsts == set(names)
    counts = [follows[pair] for pair in permutations(names, 2)]
    assert min(counts) > 0.7 * max(counts)
    assert all(len(rates) == 40 for rates in result.rates.values())


@pytest.mark.slow
def test_the_engines_of_a_level_are_gone_before_the_next_ones_are_built(configs):
    def living():
        return sum(type(one) is Engine for one in gc.get_objects())

    counts = list[int]()
    on_run = lambda name: counts.append(living() - before)  # noqa: E731
    plan = sweep(configs, levels=(1, 2), min_rounds=1, max_rounds=1, on_run=on_run)
    gc.collect()
    before = living()
    gc.disable()  # they are gone at once, not when somebody looks for cycles
    try:
        list(plan.measure(requests(plan)))
    finally:
        gc.enable()
    assert set(counts) == {len(configs)}


def test_a_plot_and_strict_json_come_of_a_result(configs, tmp_path):
    plan = sweep(configs, levels=(2,), min_rounds=1, max_rounds=1)
    level = next(plan.measure(requests(plan)))
    result = {
        "levels": [level_report(level, plan.tolerance)],
        "acceptance": "decided by the target",
    }
    json.dumps(result, allow_nan=False)
    plot(result, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 1000


def test_fixed_lengths_are_fixed_and_nothing_remembers_a_round(configs):
    assert configs[PLAIN].speculation.sources == ()
    assert configs["2"].speculation.control == "fixed"
    assert configs["2"].speculation.num_speculative_tokens == 2
    assert configs[CHOSEN].speculation.control == "adaptive"
    assert not any(config.cache.enable_prefix_caching for config in configs.values())
    base = EngineConfig.from_options(model=str(pair().target), device="cpu")
    suffix = variants(base, {"method": "suffix"}, [2])["2"].speculation.sources[0]
    assert suffix.suffix_decoding_max_cached_requests == 0
