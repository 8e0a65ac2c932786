"""Tuning ranks by measured speed, says why drafts do not pay, and writes what a server takes."""

import math
import tomllib

import pytest

from outdraft.bench.side_by_side import PLAIN, share_target
from outdraft.bench.sweep import LevelResult
from outdraft.bench.tune import (
    Balance,
    balance,
    config_file,
    gain,
    level_gain,
    survivors,
    winner,
)
from outdraft.cli.tune import candidates, drafters
from outdraft.config.benchmarks import PROBE_LENGTH
from outdraft.config.engine import EngineConfig
from outdraft.config.speculation import parse_speculative_config
from outdraft.core.errors import ConfigError
from outdraft.engine.stats import StatsTotal
from tests.cli.pair import pair


def level(concurrency, **rates):
    stats = {name: StatsTotal() for name in rates}
    return LevelResult(concurrency, rates, stats)


def test_gains_are_medians_of_the_rounds_that_both_ran_and_geometric_means_over_levels():
    one = level(1, plain=[10, 20, 40], a=[20, 20], b=[10, 40, 80])
    eight = level(8, plain=[10, 10], a=[5, 5], b=[20, 20])
    assert level_gain(one, "a") == 1.5
    assert level_gain(one, "b") == 2
    assert gain([one, eight], "a") == pytest.approx(math.sqrt(1.5 * 0.5))
    assert survivors([one, eight], [PLAIN, "a", "b"]) == [PLAIN, "b"]


def total(steps, emitted, draft_s, verify_s, host_s, num_drafts=0):
    found = StatsTotal()
    found.num_steps, found.num_emitted = steps, emitted
    found.num_drafts = num_drafts
    found.draft_s, found.verify_s, found.host_s = draft_s, verify_s, host_s
    return found


def test_a_balance_is_in_steps_of_plain_decoding():
    plain, fixed = total(100, 100, 0, 0.8, 0.2), total(50, 120, 0.25, 0.6, 0.15, 50)
    found = balance(plain, fixed, 1, 1.0, 20.0)
    assert found.length == pytest.approx(2.4)
    assert found.step == pytest.approx(2.0)
    assert found.drafting == pytest.approx(0.5)
    assert found.verifying == pytest.approx(1.5)
    assert found.intensity == 4
    assert found.reason is None
    chance = found.break_even_chance
    assert sum(chance**i for i in range(4)) == pytest.approx(2.0)


def test_drafts_that_few_steps_have_must_be_accepted_more_often():
    fixed = total(100, 210, 0, 1.1, 0.1, 40)
    found = balance(total(100, 200, 0, 0.8, 0.2), fixed, 2, 1.0, None)
    assert found.share == pytest.approx(0.2)
    chance = found.break_even_chance
    assert 0.2 * (chance + chance**2 + chance**3) == pytest.approx(found.step - 1)
    assert found.step == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ((1.5, 1.1, 0.6, 1.6), "the drafter is too slow: it takes 60% of a plain step"),
        ((1.1, 1.2, 3.0, 4.3), "the drafter is too slow: it takes 300% of a plain step"),
        ((1.2, 1.1, 0.1, 1.4), "acceptance is too low: a step brings 1.20 tokens"),
        ((1.2, 2.0, 0.1, 2.1), "the target is already compute-bound"),
    ],
)
def test_why_drafts_do_not_pay(numbers, reason):
    assert Balance(*numbers, intensity=8, ridge=20).reason.startswith(reason)
    assert Balance(2.2, 2.0, 0.1, 2.1, 8, 20).reason is None
    rare = Balance(1.01, 1.02, 0.0, 1.02, 8, share=0.1).reason
    assert rare is not None
    assert rare.endswith("a step brings 1.01 tokens, and 10% of the steps have a draft")
    never = Balance(1.0, 1.02, 0.0, 1.02, 8, share=0.0)
    assert never.reason == "drafts are too rare: 0% of the steps have one"
    assert never.break_even_chance == math.inf
    assert Balance(1.0, 4.0, 1.0, 5.0, 8).break_even_chance == math.inf


@pytest.mark.parametrize(("fixed", "best"), [(1.50, "auto"), (1.51, "auto"), (1.53, "always")])
def test_fixed_lengths_win_if_they_are_clearly_faster(fixed, best):
    results = [level(1, plain=[1.0], auto=[1.5], other=[1.2], always=[fixed])]
    assert winner(results, ["always", "other", "auto"], ["always"]) == best


def test_a_written_file_is_toml_that_holds_the_choice():
    speculation = {"method": "draft_model", "model": 'a"b', "tree_levels": [2, 1]}
    values = tomllib.loads(config_file("some/model", speculation, 8, ["found"]))
    assert values == {
        "model": "some/model",
        "speculative-disable-queue-size": 8,
        "speculative-config": speculation,
    }
    assert tomllib.loads(config_file(None, {"method": "eagle3"}, None, ["found"])) == {
        "speculative-config": {"method": "eagle3"}
    }
    assert tomllib.loads(config_file("m", None, None, [])) == {
        "model": "m",
        "speculative-config": "null",
    }


def test_drafters_are_named_by_their_methods():
    assert drafters("m", ["a", "eagle3=b"]) == {"draft_model": "a", "eagle3": "b"}
    assert drafters("m", ["mtp"]) == {"mtp": None}
    for wrong in (["a", "b"], ["none=a"]):
        with pytest.raises(ConfigError):
            drafters("m", wrong)


def test_each_source_has_a_candidate_of_the_length_that_explains():
    found = candidates({"draft_model": "a", "medusa": "b"})
    configs = {name: parse_speculative_config(values) for name, values in found.items()}
    for method in ("suffix", "ngram", "draft_model", "medusa"):
        probe = configs[f"always {PROBE_LENGTH}: {method}"]
        assert (probe.control, probe.max_drafts) == ("fixed", PROBE_LENGTH)
        assert [str(source) for source in probe.methods] == [method]
    for bits in ("int8", "int4"):
        assert configs[f"medusa, {bits}"].network.quantization == bits


def speculative(values, model=None):
    return EngineConfig.from_options(
        model=str(model or pair().target), device="cpu", speculative_config=values
    )


def test_what_cannot_be_built_is_left_out_with_its_reason():
    heads = {"method": "medusa", "model": str(pair().heads["medusa"])}
    configs = {
        PLAIN: speculative(None),
        "medusa, tree": speculative(heads | {"tree_levels": [2, 1, 1, 1, 1]}),
        "eagle3": speculative({"method": "eagle3", "model": "/no/such/folder"}),
        "medusa": speculative(heads),
    }
    left_out: dict[str, str] = {}
    models = share_target(configs, left_out)
    assert list(models) == [PLAIN, "medusa"]
    assert models["medusa"].target is models[PLAIN].target
    assert list(left_out) == ["medusa, tree", "eagle3"]
    assert "has 4 heads" in left_out["medusa, tree"]
    assert "/no/such/folder" in left_out["eagle3"]


def test_without_plain_decoding_there_is_nothing_to_compare_with():
    with pytest.raises(ConfigError, match="/no/such/model"):
        share_target({PLAIN: speculative(None, "/no/such/model")}, {})
