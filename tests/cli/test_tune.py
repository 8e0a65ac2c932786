"""`outdraft tune` as a shell sees it."""

import re
import tomllib

import pytest

from outdraft.bench import tune
from tests.cli.test_commands import run


@pytest.mark.slow
@pytest.mark.usefixtures("embedded")
def test_it_ranks_explains_and_writes_a_file_for_a_server(command, tmp_path):
    output = tmp_path / "best.toml"
    arguments = ["--concurrency", "1,2", "--rounds", "1", "--output-len", "6", "-o", str(output)]
    result = run(command, "tune", "--device", "cpu", "--max-model-len", "64", *arguments)
    assert result.exit_code == 0, result.stderr
    for name in ("draft_model", "draft_model, int8", "draft_model, tree", "combined", "suffix"):
        assert name in result.stdout
    for method in ("draft_model", "suffix", "ngram"):
        assert f"always 3: {method}, 2 at once: a step takes" in result.stdout
    assert "it breaks even" in result.stdout
    values = tomllib.loads(output.read_text())
    assert set(values) <= {"speculative-config", "speculative-disable-queue-size"}
    assert "speculative-config" in values
    assert str(tmp_path) not in output.read_text()
    assert f"outdraft serve --config {output}" in result.stdout.replace("\n", "")


@pytest.mark.usefixtures("embedded")
def test_where_a_drafted_token_costs_a_step_speculation_does_not_pay(
    command, tmp_path, monkeypatch
):
    """The clock counts passes and drafted tokens, so that no draft can save any time."""
    race = tune.race

    def counted(*arguments):
        results = race(*arguments)
        for result in results:
            for name, total in result.stats.items():
                ticks = total.num_steps + total.num_draft_tokens
                result.rates[name] = [total.num_emitted / ticks]
        return results

    monkeypatch.setattr(tune, "race", counted)
    output = tmp_path / "best.toml"
    arguments = ["--concurrency", "1", "--rounds", "1", "--output-len", "6", "-o", str(output)]
    result = run(command, "tune", "--device", "cpu", "--max-model-len", "64", *arguments)
    assert result.exit_code == 0, result.stderr
    found = re.search(
        r"^Speculation does not pay: the best, .*, gives (.*)\.$", result.stdout, re.M
    )
    assert found is not None
    assert float(found[1]) <= 1
    assert "requests at once and loses" not in result.stdout
    written = output.read_text()
    assert tomllib.loads(written) == {"speculative-config": "null"}
    assert written.startswith("# speculation does not pay")


@pytest.mark.usefixtures("embedded")
def test_a_drafter_that_cannot_be_loaded_is_left_out_and_the_others_are_tried(command):
    arguments = [
        "--concurrency",
        "1",
        "--rounds",
        "1",
        "--output-len",
        "6",
        "--draft",
        "medusa=/no",
    ]
    result = run(command, "tune", "--device", "cpu", "--max-model-len", "64", *arguments)
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if line.startswith("left out: medusa")]
    assert len(lines) == 4
    assert all("/no" in line for line in lines)
    assert "suffix" in result.stdout
