"""Shares of limits, their bars, and the document's table of them."""

import pytest
from committed import Result
from roofline_table import roofline_table
from shares import shares


def result(dtype="bfloat16", library="x86-64-v4-bf16", quantization=None, threads=2):
    """Each limit is a second; the shortest of three times and the middle one stand here."""
    times_s = {
        "products, 1": (1.25, 2.0),  # 80 %: misses 85
        "products, 2": (4.0, 5.0),  # no bar
        "products, 8": (1.25, 2.5),  # just meets 80; as long as one row by the best times
        "products, 256": (1.6, 2.0),  # 62.5 %: meets 60
        "pass, 1": (1.25, 2.0),  # just meets 80
        "pass, 256": (2.0, 2.0),  # 50 %: misses 55
        "pass, 8 requests": (1.75, 2.0),  # 1.4 times one
        "pass, prompt of 256": (1.0, 1.0),
    }
    return {
        "environment": {"processor": "AMD EPYC"},
        "dtype": dtype,
        "library": library,
        "quantization": quantization,
        "threads": threads,
        "bandwidths": [30e9, 20e9, 25e9],
        "peaks": [9e11, 1.2345e12],
        "limits_s": dict.fromkeys(times_s, 1.0),
        "samples_s": {name: [9.0, best, middle] for name, (best, middle) in times_s.items()},
    }


def found(**settings):
    return {share.name: share for share in shares(result(**settings))}


def test_shares_are_of_the_best_and_of_the_median_time():
    share = found()["products, 8"]
    assert (share.best, share.median) == (0.8, 0.4)
    assert (share.number(share.best), share.number(share.median)) == ("80.0%", "40.0%")


@pytest.mark.parametrize(
    ("name", "wanted", "verdict"),
    [
        ("products, 1", "85%", "missed"),
        ("products, 2", "", ""),
        ("products, 8", "80%", "met"),
        ("products, 256", "60%", "met"),
        ("pass, 1", "80%", "met"),
        ("pass, 256", "55%", "missed"),
        ("pass, 8 requests", "", ""),
        ("pass, prompt of 256", "", ""),
        ("products of 8 rows by 1", "at most 1.2", "met"),
        ("8 requests by 1", "at most 1.35", "missed"),
    ],
)
def test_bars_are_met_by_the_best_time(name, wanted, verdict):
    share = found()[name]
    assert (share.wanted, share.verdict) == (wanted, verdict)


@pytest.mark.parametrize(
    ("settings", "bars"),
    [
        ({}, 7),
        ({"library": "x86-64-v4-amx"}, 7),
        ({"library": "x86-64-v4"}, 5),
        ({"dtype": "float32"}, 5),
        ({"quantization": "int8"}, 0),
    ],
)
def test_few_rows_have_bars_where_bfloat16_is_multiplied_and_quantised_weights_none(settings, bars):
    assert sum(share.bar is not None for share in found(**settings).values()) == bars
    ratio = found(**settings)["8 requests by 1"]
    assert (ratio.best, ratio.median) == (1.4, 1.0)


def test_a_result_of_other_rows_lacks_what_needs_them():
    other = result()
    del other["samples_s"]["pass, 1"]
    assert "8 requests by 1" not in {share.name for share in shares(other)}


def test_the_table_has_the_newest_result_of_each_machine_and_says_what_it_is_of():
    fewer = result(dtype="float32", library="x86-64-v3")
    del fewer["samples_s"]["products, 2"]
    results = [
        Result("old.json", result(), 1.0, "commit a"),
        Result("new.json", result(), 2.0, "commit b, tree with changes"),
        Result("one-thread.json", result(threads=1), 3.0, "commit c"),
        Result("other.json", fewer, 0.0, "commit d"),
    ]
    lines = roofline_table(results).splitlines()
    assert lines[0] == "| | AMD EPYC, bfloat16, x86-64-v4-bf16 | AMD EPYC, float32, x86-64-v3 |"
    assert "| products, 2 | 25.0% (20.0%) |  |" in lines
    assert f"| products, 1 |{' 80.0% (50.0%); 85%, **missed** |' * 2}" in lines
    assert "| 8 requests by 1 | 1.400 (1.000); at most 1.35, **missed** | 1.400 (1.000) |" in lines
    assert lines[-2:] == [
        "- `new.json`: commit b, tree with changes. 3 turns; memory was read at 20.0 to 30.0 GB/s, "
        "registers multiplied at up to 1,234 GFLOP/s. 4 of 7 bars are met.",
        "- `other.json`: commit d. 3 turns; memory was read at 20.0 to 30.0 GB/s, "
        "registers multiplied at up to 1,234 GFLOP/s. 3 of 5 bars are met.",
    ]
