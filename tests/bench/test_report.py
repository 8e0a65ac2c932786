"""Tables, files, plots: what a reader gets."""

import json
import math
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from outdraft.bench import report
from outdraft.bench.metrics import RequestSample
from outdraft.bench.report import (
    as_table,
    check_installed,
    environment,
    sweep_picture,
    sweep_plot,
    sweep_table,
    write_json,
)
from outdraft.bench.serve import LoadRun, TrafficPlan, serve_report
from outdraft.bench.workloads import BenchRequest
from outdraft.core.errors import ConfigError
from outdraft.engine.stats import StatsTotal

PNG = b"\x89PNG\r\n\x1a\n"


def result(concurrency=2, **reporting):
    """Two answers and a failure, by hand."""
    samples = [
        RequestSample(0.0, 0.0, [0.5, 1.0], 1.0, prompt_tokens=4, completion_tokens=3, text="ab"),
        RequestSample(1.0, 1.0, [1.5, 2.0], 2.0, prompt_tokens=4, completion_tokens=3, text="cd"),
        RequestSample(1.0, 1.0, [], 1.5, error="HTTP 429: full"),
    ]
    counters = StatsTotal(
        num_drafts=4, num_draft_tokens=8, num_accepted_tokens=6, accepted_at=Counter({0: 4, 1: 2})
    )
    run = LoadRun(samples, 2.0, counters, 0)
    requests = [BenchRequest(str(i), 3) for i in range(3)]
    return serve_report(run, requests, TrafficPlan(max_concurrency=concurrency), **reporting)


def test_a_load_tests_result_is_this():
    whole = result()
    notes = whole.pop("notes")
    assert len(notes) == 3
    assert whole == {
        "num_prompts": 3,
        "num_distinct_prompts": 3,
        "request_rate": "inf",
        "burstiness": 1.0,
        "max_concurrency": 2,
        "num_warmups": 0,
        "seed": 0,
        "duration": 2.0,
        "completed": 2,
        "failed": 1,
        "failures": {"HTTP 429: full": 1},
        "total_input_tokens": 8,
        "total_output_tokens": 6,
        "num_missing_usage": 0,
        "request_throughput": 1.0,
        "output_throughput": 3.0,
        "total_token_throughput": 7.0,
        "max_concurrent_requests": 2,
        "num_chunks": 4,
        "num_bunched_chunks": 0,
        "tokens_per_chunk": 1.5,
        **{f"{word}_ttft_ms": 500.0 for word in ("mean", "median", "p99")},
        **{f"{word}_tpot_ms": 250.0 for word in ("mean", "median", "p99")},
        **{f"{word}_itl_ms": 500.0 for word in ("mean", "median", "p99")},
        **{f"{word}_e2el_ms": 1000.0 for word in ("mean", "median", "p99")},
        **{f"std_{name}_ms": 0.0 for name in ("ttft", "tpot", "itl", "e2el")},
        "spec_decode_acceptance_rate": 75.0,
        "spec_decode_acceptance_length": 2.5,
        "spec_decode_num_drafts": 4,
        "spec_decode_draft_tokens": 8,
        "spec_decode_accepted_tokens": 6,
        "spec_decode_per_position_acceptance_rates": [1.0, 0.5],
    }


def test_raw_samples_are_added_only_on_request():
    assert "generated_texts" not in result()
    detailed = result(is_detailed=True)
    assert detailed["generated_texts"] == ["ab", "cd", ""]
    assert detailed["ttfts"] == [0.5, 0.5, None]


def test_the_table_shows_every_number_that_was_reported():
    lines = as_table("Serving", result(percentiles=(50.0, 99.9))).splitlines()
    shown = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in lines if ":" in line)
    }
    assert shown["Successful requests"] == "2"
    assert shown["Failed requests"] == "1"
    assert shown["Output token throughput (tok/s)"] == "3.00"
    assert shown["P99.9 TPOT (ms)"] == "250.00"
    assert shown["Mean E2EL (ms)"] == "1000.00"
    assert shown["Acceptance length"] == "2.50"
    assert shown["Position 1"] == "50.00"
    assert "1 x HTTP 429: full" in lines
    assert any(line.startswith("note: closed loop") for line in lines)
    assert any("ITL is the time between chunks" in line for line in lines)


def test_a_latency_that_no_request_has_is_a_dash():
    run = LoadRun([RequestSample(0.0, error="not sent")], 1.0, None, 0)
    empty = serve_report(run, [BenchRequest("a", 1)], TrafficPlan())
    assert any(
        line.split() == ["Mean", "TTFT", "(ms):", "-"] for line in as_table("x", empty).splitlines()
    )


def test_json_comes_back_as_it_was_and_holds_no_nan(tmp_path):
    path = tmp_path / "new" / "result.json"
    write_json(path, result())
    assert json.loads(path.read_text()) == result()
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": math.nan})


def sweep():
    rows = [result(level) for level in (1, 2, 4)]
    return [row | {"output_throughput": 10.0 * (i + 1)} for i, row in enumerate(rows)]


def test_a_sweep_is_a_table_a_picture_and_a_plot_in_letters(tmp_path):
    table = sweep_table(sweep()).splitlines()
    assert [line.split()[:2] for line in table[1:]] == [
        ["1", "10.00"],
        ["2", "20.00"],
        ["4", "30.00"],
    ]
    path = tmp_path / "new" / "sweep.png"
    sweep_picture(sweep(), path)
    assert path.read_bytes().startswith(PNG)
    assert len(path.read_bytes()) > 5000
    plot = sweep_plot(sweep())
    assert "output tokens/s over concurrent requests" in plot
    assert "\x1b" not in plot
    assert plot.splitlines()[-1].split() == ["1", "2", "4"]


def test_a_sweep_in_which_everything_failed_still_has_its_plots(tmp_path):
    rows = [row | {"median_ttft_ms": None, "median_tpot_ms": None} for row in sweep()]
    sweep_picture(rows, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").read_bytes().startswith(PNG)
    assert " - " in sweep_table(rows)


def test_a_missing_package_names_the_extra():
    check_installed("httpx", "matplotlib")
    with pytest.raises(
        ConfigError, match=r"needs no_such_package: pip install 'outdraft\[bench\]'"
    ):
        check_installed("httpx", "no_such_package")


def git(folder, *arguments):
    identity = ["-c", "user.name=x", "-c", "user.email=x@x"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_the_environment_names_the_commit_only_of_a_tracked_package(tmp_path, monkeypatch):
    package = tmp_path / "src" / "outdraft" / "bench"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    monkeypatch.setattr(report, "__file__", str(package / "report.py"))
    assert environment()["commit"] is None
    git(tmp_path, "init")
    git(tmp_path, "commit", "--allow-empty", "-m", "x")
    assert environment()["commit"] is None  # a checkout of something else
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "y")
    head = (tmp_path / ".git" / "HEAD").read_text().split()[-1]
    here = environment()
    assert here["commit"] == (Path(tmp_path) / ".git" / head).read_text().strip()
    assert here["is_dirty"] is False
    (package.parent / "__init__.py").write_text("new")
    assert environment()["is_dirty"] is True
    assert here["versions"]["torch"]
    json.dumps(here, allow_nan=False)
