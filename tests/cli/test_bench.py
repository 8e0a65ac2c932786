"""`outdraft bench` as a shell sees it."""

import json
import subprocess
import sys

import pytest

from outdraft.cli.command import check_output
from tests.bench.scripted_server import Script, completion, serving
from tests.cli.test_commands import SMALL, run


def answers(number, body):
    return completion(["a", "b"], usage=(5, 4))


@pytest.mark.usefixtures("embedded")
def test_serve_prints_a_table_and_writes_a_result(command, tmp_path):
    arguments = ["--num-prompts", "3", "--max-concurrency", "2", "--num-warmups", "1"]
    arguments += ["--save-result", "--save-detailed", "--result-filename", "one.json"]
    arguments += ["--temperature", "0", "--metric-percentiles", "50,99", "--output-len", "7"]
    with serving(answers) as seen:
        result = run(
            command, "bench", "serve", "--base-url", seen.url, *arguments, "--result-dir", tmp_path
        )
    assert result.exit_code == 0
    assert "Successful requests:" in result.stdout
    assert "note: closed loop" in result.stdout
    assert len(seen.bodies) == 4
    assert {(body["temperature"], body["max_tokens"]) for body in seen.bodies} == {(0.0, 7)}
    written = json.loads((tmp_path / "one.json").read_text())
    assert written["completed"] == 3
    assert written["model_id"] == "scripted"
    assert written["endpoint"] == "/v1/completions"
    assert written["dataset_name"] == "embedded"
    assert written["output_lens"] == [4, 4, 4]
    assert "p50_tpot_ms" in written
    assert {"commit", "host", "versions"} <= set(written["environment"])


@pytest.mark.usefixtures("embedded")
def test_a_sweep_is_one_file_with_a_picture_and_fresh_prompts_for_each_run(command, tmp_path):
    with serving(answers) as seen:
        arguments = ["--sweep", "1,2", "--num-prompts", "2", "--port", seen.port, "--save-result"]
        arguments += ["--result-filename", "s.json", "--endpoint", "/v1/completions"]
        result = run(command, "bench", "serve", *arguments, "--result-dir", tmp_path)
    assert result.exit_code == 0
    written = json.loads((tmp_path / "s.json").read_text())
    assert [one["max_concurrency"] for one in written["sweep"]] == [1, 2]
    assert (tmp_path / "s.png").stat().st_size > 5000
    assert "output tokens/s over concurrent requests" in result.stdout
    assert len({body["prompt"] for body in seen.bodies}) == 4


@pytest.mark.usefixtures("embedded")
def test_a_test_in_which_everything_failed_is_exit_code_1(command):
    with serving(lambda number, body: Script(status=503, body="draining")) as seen:
        result = run(command, "bench", "serve", "--base-url", seen.url, "--num-prompts", "2")
    assert result.exit_code == 1
    assert "2 x HTTP 503: draining" in result.stdout


@pytest.mark.usefixtures("embedded")
@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sweep", "1,b"], "--sweep must be numbers"),
        (["--sweep", "1,2", "--request-rate", "3"], "leave out --max-concurrency and"),
        (["--endpoint", "/v1/responses"], "--endpoint must be /v1/completions or"),
        (["--sweep", "0"], "max_concurrency must be at least 1"),
        (["--header", "key"], "KEY=VALUE"),
        (["--extra-body", "[]"], "must be a JSON object"),
        (["--extra-body", "{"], "not valid JSON"),
        (["--dataset-name", "sonnet"], "one of embedded"),
        (["--dataset-name", "random"], "--tokenizer"),
        (["--percentile-metrics", "ttfb"], "no metric 'ttfb'"),
        (["--port", "1"], "is the server up"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_exit_code_2(command, arguments, complaint):
    result = run(command, "bench", "serve", *arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        (["bench", "serve", "--save-result", "--result-dir"], "--result-dir"),
        (["bench", "latency", "--output-json"], "--output-json"),
        (["bench", "throughput", "--output-json"], "--output-json"),
        (["bench", "sweep", "--output-json"], "--output-json"),
        (["tune", "--output"], "--output"),
    ],
)
def test_a_result_that_cannot_be_written_is_told_before_anything_is_measured(
    command, arguments, flag, tmp_path
):
    (tmp_path / "file").write_text("")
    result = run(command, *arguments, tmp_path / "file" / "result")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {flag}: ")
    assert "cannot be written" in result.stderr


def test_checking_a_result_leaves_no_file_behind_and_an_older_one_as_it_is(tmp_path):
    check_output(tmp_path / "folder" / "new", "--x")
    (tmp_path / "old").write_text("old")
    check_output(tmp_path / "old", "--x")
    assert not (tmp_path / "folder" / "new").exists()
    assert (tmp_path / "old").read_text() == "old"


def test_random_prompts_are_token_ids_that_go_on_behind_the_end(command, pair):
    arguments = ["--dataset-name", "random", "--tokenizer", pair.target, "--input-len", "6"]
    with serving(answers) as seen:
        more = ["--extra-body", '{"top_k": 3}', "--num-prompts", "2", "--base-url", seen.url + "/"]
        result = run(command, "bench", "serve", *arguments, *more)
    assert result.exit_code == 0
    for body in seen.bodies:
        assert len(body["prompt"]) == 6
        assert body["ignore_eos"] is True
        assert body["top_k"] == 3


@pytest.mark.usefixtures("embedded")
def test_latency_writes_a_result_and_a_trace(command, tmp_path):
    path = tmp_path / "latency.json"
    arguments = ["--num-iters", "2", "--num-iters-warmup", "1", "--output-len", "8", "--profile"]
    result = run(command, "bench", "latency", *arguments, "--output-json", path, *SMALL)
    assert result.exit_code == 0
    assert "Avg latency (s):" in result.stdout
    written = json.loads(path.read_text())
    assert len(written["latencies"]) == 2
    assert written["device"] == "cpu"
    assert written["dtype"] == "float32"
    assert "draft_model" in written["speculation_methods"]
    assert written["environment"]["versions"]["torch"]
    trace = json.loads((tmp_path / "latency.trace.json").read_text())
    assert any(event.get("name") == "verify" for event in trace["traceEvents"])


def test_throughput_takes_any_model_and_dataset(command, pair, tmp_path):
    path = tmp_path / "throughput.json"
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"def {name}"}) for name in "abcdef"))
    arguments = ["--dataset-name", "custom", "--dataset-path", data, "--output-len", "5"]
    arguments += ["--num-prompts", "5", "--max-num-seqs", "2", "--output-json", path]
    result = run(command, "bench", "throughput", "--model", pair.target, *arguments, *SMALL)
    assert result.exit_code == 0
    written = json.loads(path.read_text())
    assert written["num_requests"] == 5
    assert written["total_output_tokens"] == 25
    assert written["speculation_methods"] == []
    assert "Speculative Decoding" not in result.stdout


def test_other_commands_load_nothing_of_the_benchmarks():
    code = "import sys, outdraft.cli.app\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "outdraft.cli.bench" in loaded
    assert not {"httpx", "matplotlib", "plotext", "torch", "outdraft.bench"} & set(loaded)


@pytest.mark.usefixtures("embedded")
def test_lengths_are_swept_into_a_file_that_says_what_was_computed_in(command, tmp_path):
    path = tmp_path / "sweep.json"
    arguments = ["--concurrency", "1", "--lengths", "1", "--min-rounds", "1", "--max-rounds", "1"]
    arguments += ["--output-len", "8", "--output-json", path, *SMALL[2:]]  # no dtype
    result = run(command, "bench", "sweep", *arguments)
    assert result.exit_code == 0
    written = json.loads(path.read_text())
    assert written["dtype"] == "float32"  # of the pair's checkpoints
    assert [one["concurrency"] for one in written["levels"]] == [1]
    assert {"commit", "is_dirty", "capability"} <= set(written["environment"])
    assert path.with_suffix(".png").exists()
