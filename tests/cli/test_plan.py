"""`outdraft plan` as a shell sees it."""

import json

import pytest

from tests.cli.test_commands import run

PAIR = ["--target", "llama-3.3-70b", "--draft", "llama-3.2-1b", "--hardware", "2xh100"]
CARDS = ["--tp", "2", "--draft-tp", "1", "--interconnect", "nvlink"]
TRAFFIC = ["--concurrency", "1,8,16,64", "--acceptance", "0.7"]


def planned(command, *arguments):
    result = run(command, "plan", *PAIR, *CARDS, *TRAFFIC, "--json", *arguments)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_holds_times_lengths_memory_and_the_mode(command):
    plan = planned(command)
    assert plan["mode"] == "roofline"
    assert [level["concurrency"] for level in plan["levels"]] == [1, 8, 16, 64]
    for level in plan["levels"]:
        times = level["tpot_ms_by_length"]
        assert level["tpot_ms"] == min(times) == times[level["best_length"]]
        assert level["tpot_ms_low"] < level["tpot_ms"] < level["tpot_ms_high"]
        step_ms = sum(level["step_ms"].values())
        assert step_ms / level["tokens_a_step"] == pytest.approx(level["tpot_ms"])
        assert set(level["step_ms"]) == {"draft", "target", "communication", "host"}
    assert plan["memory"]["kv_gib"] > 0
    assert plan["break_even_concurrency"] > 1


def test_measured_points_change_the_mode_and_the_times(command):
    plan = planned(command, "--measured", "1:0:43.31", "--measured", "64:0:68.29")
    assert plan["mode"] == "calibrated"
    assert "2 measured points" in plan["basis"]
    assert plan["levels"][0]["plain_tpot_ms"] == pytest.approx(43.31, rel=0.05)


@pytest.mark.parametrize("mode", ["roofline", "calibrated"])
def test_tables_name_the_mode(command, mode):
    points = ["--measured", "1:0:43.31"] if mode == "calibrated" else []
    lengths = ["--input-len", "700", "--output-len", "90"]
    result = run(command, "plan", *PAIR, *CARDS, *TRAFFIC, *lengths, *points)
    assert result.exit_code == 0
    heading = " ".join(result.stdout.partition("Mode:")[0].split())
    assert heading.endswith("prompts of 700 tokens, outputs of 90")
    assert f"Mode: {mode}." in result.stdout
    for word in (
        "best",
        "A step of the best length",
        "TPOT ms by length",
        "Memory of the fullest card",
        "Drafts pay up to",
    ):
        assert word in result.stdout


def test_a_picture_is_drawn(command, tmp_path):
    path = tmp_path / "plan.png"
    result = run(command, "plan", *PAIR, *TRAFFIC, "--plot", str(path))
    assert result.exit_code == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("draft", ["eagle3", "medusa", "ngram", "suffix"])
def test_methods_without_a_model_of_their_own(command, draft):
    plan = planned(command, "--draft", draft)
    assert plan["setup"]["method"] == draft
    is_host = draft in ("ngram", "suffix")
    assert (plan["levels"][0]["step_ms"]["draft"] == 0) == is_host


def test_folders_of_checkpoints_can_be_planned(command, pair):
    result = run(
        command, "plan", "--target", str(pair.target), "--draft", str(pair.drafter),
        "--hardware", "laptop", "--json",
    )  # fmt: skip
    assert result.exit_code == 0
    assert json.loads(result.stdout)["setup"]["method"] == "draft_model"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "h1000"], "unknown hardware"),
        (["--target", "lama"], "no known model"),
        (["--acceptance", "x"], "--acceptance must be numbers"),
        (["--measured", "1:2"], "a measured point is a file or"),
        (["--measured", "1:0:nan"], "a measured point needs"),
        (["--measured", "1:-2:5"], "a measured point needs"),
        (["--measured", "1:3:5:9"], "1 to length + 1 tokens a step"),
        (["--concurrency", "1,1000000000"], "concurrency must be between 1 and 100000"),
        (["--plot", "plan.pgn"], "--plot must be a file that ends in .png or .svg"),
        (["--tp", "3"], "between 1 and the 2 cards"),
    ],
)
def test_wrong_values_are_one_line(command, arguments, message):
    result = run(command, "plan", *PAIR, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_points_that_are_no_text_are_one_line(command, tmp_path):
    (tmp_path / "points").write_bytes(b"\xff")
    result = run(command, "plan", *PAIR, "--measured", str(tmp_path / "points"))
    assert result.exit_code == 2
    assert "cannot be read" in result.stderr
