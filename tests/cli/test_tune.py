"""`outdraft tune` as a shell sees it."""

import tomllib

import pytest

from tests.cli.test_commands import run


@pytest.mark.usefixtures("embedded")
def test_it_ranks_explains_and_writes_a_file_for_a_server(command, tmp_path):
    output = tmp_path / "best.toml"
    arguments = ["--concurrency", "1,2", "--rounds", "1", "--output-len", "6", "-o", str(output)]
    result = run(command, "tune", "--device", "cpu", "--max-model-len", "64", *arguments)
    assert result.exit_code == 0, result.stderr
    for name in ("draft_model", "draft_model, int8", "draft_model, tree", "combined", "suffix"):
        assert name in result.stdout
    assert "it breaks even" in result.stdout
    values = tomllib.loads(output.read_text())
    assert set(values) <= {"speculative-config", "speculative-disable-queue-size"}
    assert "speculative-config" in values
    assert str(tmp_path) not in output.read_text()
    assert f"outdraft serve --config {output}" in result.stdout.replace("\n", "")


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
    assert len(lines) == 3
    assert all("/no" in line for line in lines)
    assert "suffix" in result.stdout
