"""The document's table and plot of sweeps: a row for each setting, holes, wide intervals."""

import re

import pytest
from committed import Result
from sweep_table import setting, sweep_plot, sweep_table

SOURCE = "DraftNetworkConfig(model='x', source=<DraftSource.MODEL: 'draft_model'>, tree=None)"


def level(concurrency, median, low, high, plain=1.0, num_rounds=3):
    ratio = {"median": median, "low": low, "high": high}
    return {
        "concurrency": concurrency,
        "num_rounds": num_rounds,
        "ratio_to_best": ratio,
        "ratio_to_plain": ratio | {"median": plain},
    }


def sweep(*levels, capability="AVX2", **other):
    return {
        "environment": {"processor": "AMD EPYC", "capability": capability},
        "model_id": "src/outdraft/assets/target",
        "dtype": "auto",
        "temperature": 0.0,
        "synthetic_acceptance": None,
        "speculation": {"plain": "SpeculationConfig(sources=())", "auto": SOURCE},
        "levels": list(levels),
    } | other


@pytest.fixture
def results():
    old, new = level(1, 0.5, 0.5, 0.5), level(2, 0.9696, 0.95, 0.991, 1.234, num_rounds=7)
    coins = {"model_id": "models/big", "synthetic_acceptance": [0.5, 0.8], "temperature": 1.0}
    return [
        Result("big.json", sweep(level(1, 1.0, 0.99, 1.0), **coins), 0.0, "commit a"),
        Result("old.json", sweep(old), 1.0, "commit b"),
        Result("new.json", sweep(new, level(1, 0.97, 0.97, 1.0099)), 2.0, "commit c"),
        Result("t1.json", sweep(level(4, 0.9, 0.9, 0.9), temperature=1.0), 0.0, "commit d"),
    ]


def test_rows_are_the_newest_sweep_of_each_setting(results):
    lines = sweep_table(results).splitlines()
    assert lines[0] == "| machine | dtype | T | model, drafter | 1 | 2 | 4 | 8 | 16 | 32 |"
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:5]]
    assert [row[:4] for row in rows] == [
        ["AMD EPYC, AVX2", "float32", "0", "small, draft model"],
        ["AMD EPYC, AVX2", "float32", "1", "small, draft model"],
        ["AMD EPYC, AVX2", "float32", "1", "big, draft model, coins of 0.5 and 0.8"],
    ]
    assert rows[0][4:] == [
        "**0.970** (0.970 to 1.010); 1.00",
        "0.970 (0.950 to 0.991)\\*; 1.23",
        *["not measured"] * 4,
    ]
    assert rows[1][4:] == [*["not measured"] * 2, "0.900 (0.900 to 0.900); 1.00"] + (
        ["not measured"] * 3
    )
    assert rows[2][4] == "**1.000** (0.990 to 1.000); 1.00"


def test_it_says_how_many_reach_the_bar_and_what_rows_are_of(results):
    text = sweep_table(results)
    assert text.split("\n\n")[1:] == [
        "2 of 4 ratios reach 0.97. 2 intervals lie above it whole, 1 below, and 1 are wide.",
        "- `new.json`: commit c; 3 to 7 rounds.\n"
        "- `t1.json`: commit d; 3 rounds.\n"
        "- `big.json`: commit a; 3 rounds.\n"
        "- Not shown, as newer files are of the same settings: `old.json`.",
    ]


def test_levels_may_be_measured_apart_and_each_is_the_newest(results):
    later = sweep(level(32, 1.0, 1.0, 1.0), level(2, 0.99, 0.99, 0.99))
    results.append(Result("later.json", later, 3.0, "commit e"))
    text = sweep_table(results)
    cells = [cell.strip() for cell in text.splitlines()[2].strip("|").split("|")]
    assert cells[4:6] == ["**0.970** (0.970 to 1.010); 1.00", "**0.990** (0.990 to 0.990); 1.00"]
    assert cells[6:] == [*["not measured"] * 3, "**1.000** (1.000 to 1.000); 1.00"]
    assert "- `later.json`: commit e; 3 rounds.\n- `new.json`" in text
    assert text.endswith("`old.json`.")
    assert text.startswith(sweep_table(list(reversed(results))).split("\n\n")[0])


def test_other_levels_have_columns_too(results):
    results.append(Result("six.json", sweep(level(6, 1.0, 1.0, 1.0)), 3.0, "commit e"))
    assert "| 4 | 6 | 8 |" in sweep_table(results)


@pytest.mark.parametrize(
    ("other", "dtype", "model"),
    [
        ({"capability": "AVX512"}, "bfloat16", "small"),
        ({"capability": "DEFAULT"}, "auto", "small"),
        ({"dtype": "float32", "capability": "AVX512"}, "float32", "small"),
        ({"model_id": ""}, "float32", "small"),
        ({"model_id": "models/target"}, "float32", "target"),
        ({"model_id": "big"}, "float32", "big"),
    ],
)
def test_a_setting_tells_what_auto_was_and_which_pair_it_is(other, dtype, model):
    one = setting(sweep(**other))
    assert (one.dtype, one.model, one.drafter) == (dtype, model, "draft model")


@pytest.mark.slow
def test_the_plot_has_a_panel_for_each_setting_and_is_the_same_each_time(results, tmp_path):
    for name in ("one.svg", "two.svg"):
        sweep_plot(results, tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert text == (tmp_path / "two.svg").read_text()
    titles = re.findall(r"<!-- ((?:AMD|small|big)[^>]*) -->", text)
    assert titles == [
        *("AMD EPYC, AVX2, float32, T=0", "small, draft model"),
        *("AMD EPYC, AVX2, float32, T=1", "small, draft model"),
        *("AMD EPYC, AVX2, float32, T=1", "big, draft model, coins of 0.5 and 0.8"),
    ]
    # A point for each level, in the colour of its verdict.
    assert (text.count("fill: #2ca02c"), text.count("fill: #d62728")) == (2, 2)
