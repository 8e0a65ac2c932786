"""`outdraft replay`: a trace in, scores out, and errors that name what is wrong."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest

from outdraft.cli.app import app
from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.core.recorded import RecordedStep
from tests.planning.recording import drafted_by_network, made_up

TABLE = CostTable(
    CostCurve((1, 16), (1.0, 2.0)),
    drafters={"draft_model": DrafterCost(CostCurve((1,), (0.1,)), CostCurve((1,), (0.0,)))},
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two texts that repeat themselves, one that a network drafted for, one that was aborted."""
    rng = np.random.default_rng(1)
    repeated = [5, 6, 7, 8, 9] * 12
    requests = [
        made_up(repeated, [RecordedStep(1)] * 60),
        made_up(repeated, [RecordedStep(1)] * 60, arrival_s=1.0),
        drafted_by_network(rng, 80, 3, 0.7),
        made_up([], [], finish_reason="abort"),
    ]
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(one) + b"\n" for one in requests))
    return path


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    path.write_text(TABLE.to_json())
    return path


def test_a_trace_is_scored_with_costs_and_the_same_each_time(command, trace, costs):
    call = ["replay", str(trace), "--concurrency", "2", "--costs", str(costs), "--json"]
    results = [command.invoke(app, call) for _ in range(2)]
    assert results[0].exit_code == 0, results[0].output
    assert results[0].stdout == results[1].stdout
    report = json.loads(results[0].stdout)
    assert report["recorded"]["num_requests"] == 4
    assert report["recorded"]["num_aborted"] == 1
    assert [one["method"] for one in report["scores"]] == ["suffix", "ngram", "draft_model"]
    for one in report["scores"]:
        names = [run["name"] for run in one["runs"]]
        assert names[0] == "plain"
        assert names[-1] == "adaptive"
        assert one["runs"][0]["against_plain"] == 1.0
    suffix, ngram, network = report["scores"]
    assert suffix["sources"][0]["basis"] == ngram["sources"][0]["basis"] == "replayed"
    assert network["sources"][0]["basis"] == "acceptance from the trace"
    assert suffix["runs"][-2]["against_plain"] > 1.3, "the texts repeat themselves"


def test_without_costs_acceptance_alone_is_told(command, trace):
    result = command.invoke(app, ["replay", str(trace), "--concurrency", "1"])
    assert result.exit_code == 0, result.output
    assert "acceptance" in result.stdout
    assert "tokens/s" not in result.stdout
    assert "--costs" in result.stdout


def test_chosen_ways_are_scored_in_their_order(command, trace):
    ways = ['{"method": "ngram", "prompt_lookup_max": 3}', '{"method": "suffix"}']
    flags = [word for way in ways for word in ("--speculative-config", way)]
    result = command.invoke(app, ["replay", str(trace), "--json", *flags])
    assert [one["method"] for one in json.loads(result.stdout)["scores"]] == ["ngram", "suffix"]


def test_a_cut_line_is_told_and_left_out(command, trace):
    trace.write_bytes(trace.read_bytes()[:-20])
    result = command.invoke(app, ["replay", str(trace), "--json"])
    assert result.exit_code == 0
    assert "cut short" in result.stderr
    assert json.loads(result.stdout)["recorded"]["num_requests"] == 3


WRONG = {
    "a bad line": ((), "line 5: Object missing required field `format`"),
    "both costs": (("--costs", "COSTS", "--model", "m"), "exclude each other"),
    "no table": (("--costs", "TRACE"), "--costs TRACE: this is no table of costs"),
    "no drafts of it": (
        ("--speculative-config", '{"method": "medusa"}'),
        "the trace has no drafts of medusa",
    ),
    "no such key": (("--speculative-config", '{"methd": "ngram"}'), "methd"),
    "no numbers": (("--lengths", "1,b"), "--lengths"),
    "no length": (("--lengths", "0"), "--lengths must be between 1 and 63"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named(case: str, command, trace: Path, costs: Path):
    flags, told = WRONG[case]
    if case == "a bad line":
        trace.write_bytes(trace.read_bytes() + b"{}\n")
    places = {"COSTS": str(costs), "TRACE": str(trace)}
    call = ["replay", str(trace), *(places.get(word, word) for word in flags)]
    result = command.invoke(app, call)
    assert result.exit_code == 2
    assert told.replace("TRACE", str(trace)) in " ".join(result.stderr.split())


@pytest.mark.slow
def test_the_table_of_a_model_is_measured(command, embedded, trace):
    call = ["replay", str(trace), "--concurrency", "2", "--model", "embedded", "--json"]
    result = command.invoke(app, call)
    assert result.exit_code == 0, result.output
    runs = [run for one in json.loads(result.stdout)["scores"] for run in one["runs"]]
    assert all(run["tokens_per_s"] > 0 for run in runs)
