"""Lines of a trace of requests: what was written is read again, and what is wrong is named."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from outdraft.core.errors import ConfigError
from outdraft.core.recorded import RecordedOutput, RecordedRequest, RecordedStep, read_requests

GOOD: dict[str, Any] = {
    "format": 1,
    "arrival_s": 0.5,
    "elapsed_s": 2.0,
    "prompt_token_ids": [5, 6, 7],
    "max_tokens": 9,
    "temperature": 0.7,
    "rule": "block",
    "outputs": [
        {
            "token_ids": [1, 2, 3],
            "finish_reason": "stop",
            "steps": [
                {"tokens": 1},
                {"tokens": 2, "drafted": {"suffix": 4}, "accepted": {"suffix": 1}},
            ],
        }
    ],
}


def line(**changes: Any) -> bytes:
    return msgspec.json.encode(GOOD | changes) + b"\n"


def output(**changes: Any) -> dict[str, Any]:
    return {"outputs": [GOOD["outputs"][0] | changes]}


def read(folder: Path, content: bytes) -> tuple[list[RecordedRequest], bool]:
    path = folder / "trace.jsonl"
    path.write_bytes(content)
    return read_requests(path)


def test_a_request_is_read_as_it_was_written(tmp_path: Path):
    request = RecordedRequest(
        format=1,
        arrival_s=1.25,
        elapsed_s=0.5,
        prompt_token_ids=[3, 4],
        max_tokens=8,
        temperature=0.0,
        rule="greedy",
        outputs=[
            RecordedOutput([7], "length", [RecordedStep(1)]),
            RecordedOutput([], "abort", []),
        ],
        num_cached_tokens=1,
        may_draft=False,
        method="suffix",
        num_speculative_tokens=0,
        prediction_token_ids=[9],
        tree=[2, 1],
    )
    assert read(tmp_path, msgspec.json.encode(request) + b"\n") == ([request], True)


def test_requests_come_in_the_order_of_their_arrivals(tmp_path: Path):
    found, _ = read(tmp_path, line() + b"\n" + line(arrival_s=0.25))
    assert [request.arrival_s for request in found] == [0.25, 0.5]


@pytest.mark.parametrize("kept", [1, 40, len(line()) - 1])
def test_a_last_line_that_was_cut_short_is_left_out_and_told(kept: int, tmp_path: Path):
    found, is_whole = read(tmp_path, line() + line(arrival_s=0.75)[:kept])
    assert [request.arrival_s for request in found] == [0.5]
    assert not is_whole


WRONG = {
    "no JSON": (b"{", "line 2"),
    "no number": (line(arrival_s="soon"), "$.arrival_s"),
    "a negative time": (line(elapsed_s=-1), "elapsed_s"),
    "another format": (line(format=2), "$.format"),
    "an unknown field": (line(text="hello"), "text"),
    "an id that is none": (line(prompt_token_ids=[1, "b"]), "$.prompt_token_ids[1]"),
    "a negative id": (line(prompt_token_ids=[1, -2]), "prompt_token_ids"),
    "no prompt": (line(prompt_token_ids=[]), "prompt_token_ids"),
    "no output": (line(outputs=[]), "outputs"),
    "too many tokens": (line(max_tokens=2), "max_tokens"),
    "a whole prompt in the cache": (line(num_cached_tokens=3), "num_cached_tokens"),
    "an unknown end": (line(**output(finish_reason="tired")), "$.outputs[0].finish_reason"),
    "steps that bring something else": (line(**output(token_ids=[1, 2])), "token_ids"),
    "a step without tokens": (
        line(**output(steps=[{"tokens": 3}, {"tokens": 0}])),
        "$.outputs[0].steps[1]",
    ),
    "more accepted than drafted": (
        line(**output(steps=[{"tokens": 3, "drafted": {"a": 1}, "accepted": {"a": 2}}])),
        "$.outputs[0].steps[0]",
    ),
    "more accepted than emitted": (
        line(**output(steps=[{"tokens": 3, "drafted": {"a": 9}, "accepted": {"a": 4}}])),
        "$.outputs[0].steps[0]",
    ),
    "bytes that are no text": (b'{"rule": "\xff"}', "line 2"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_line_is_named_with_its_field(case: str, tmp_path: Path):
    wrong, field = WRONG[case]
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, line() + wrong.rstrip(b"\n") + b"\n" + line())
    assert "line 2" in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", line()[:-1]])
def test_a_trace_without_a_request_is_an_error(content: bytes, tmp_path: Path):
    with pytest.raises(ConfigError, match="holds no request"):
        read(tmp_path, content)


def test_a_file_that_is_not_there_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requests(tmp_path / "none")
