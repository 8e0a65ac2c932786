"""Draft heads, alone and behind other sources, over real processes: plain decoding's own text."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from outdraft import LLM, SamplingParams
from tests.cli.pair import pair
from tests.oracle.heads import random_head
from tests.server.served import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("end_to_end")]

PROMPTS = ("def add(left, right):\n    return left", "return right - return right - return")
MAX_TOKENS = 48


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_head("eagle3", pair().target, tmp_path_factory.mktemp("heads") / "eagle3")


@pytest.fixture(scope="module")
def plain() -> LLM:
    return LLM(str(pair().target), dtype="float32", device="cpu")


def streamed(server: Server, prompt: str) -> tuple[str, list[dict], list[dict], dict]:
    """The text, its tokens and steps as the trace has them, and the report of the last chunk."""
    text, tokens, steps, report = "", [], [], {}
    body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "speculation": {"trace": True}}
    with server.stream(**body) as lines:
        for line in lines:
            if line == "data: [DONE]":
                break
            chunk = json.loads(line.removeprefix("data: "))
            report = chunk.get("metrics", report)
            for choice in chunk["choices"]:
                text += choice["text"]
                tokens += choice.get("outdraft", {}).get("tokens", [])
                steps += choice.get("outdraft", {}).get("steps", [])
    return text, tokens, steps, report["speculative_decoding"]


def origins_of(step: dict) -> list[str | None]:
    """What the trace of a step promises of its tokens; None: one of the target's own."""
    drafted = step["drafted"]
    return [*(drafted[row]["source"] for row in step["accepted_rows"]), None][: step["num_emitted"]]


def sources_drafted(server: Server, plain: LLM) -> set[str]:
    """Every stream is plain decoding's, and its trace and report agree with it; who drafted."""
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    sources: set[str] = set()
    for prompt in PROMPTS:
        [want] = plain.generate([prompt], params, use_tqdm=False)
        text, tokens, steps, report = streamed(server, prompt)
        assert text == want.outputs[0].text
        assert [token["id"] for token in tokens] == want.outputs[0].token_ids
        promised = [origin for step in steps for origin in origins_of(step)]
        own = ("plain", "bonus", "recovered")
        assert promised == [None if t["origin"] in own else t["origin"] for t in tokens]
        drafted = [token["source"] for step in steps for token in step["drafted"]]
        assert report["drafted_by_source"] == {one: drafted.count(one) for one in set(drafted)}
        assert report["lossless"] is True
        kept = report["per_step_accepted"]
        for one in report["acceptance_by_level"]:
            assert one["accepted"] == sum(number >= one["level"] for number in kept)
            assert one["accepted"] <= one["reached"] <= sum(n + 1 >= one["level"] for n in kept)
        assert sum(one["accepted"] for one in report["acceptance_by_level"]) == sum(kept)
        reasons = Counter(step["reason"] for step in steps if "reason" in step)
        assert {name: one["steps"] for name, one in report["decisions"].items()} == reasons
        sources.update(drafted)
    return sources


def speculative(config: dict[str, Any]) -> list[str]:
    options = ["--dtype", "float32", "--device", "cpu", "--kv-cache-memory", "64Mi"]
    return [str(pair().target), *options, "--speculative-config", json.dumps(config)]


def exported_sources(server: Server) -> set[str]:
    name = "spec_decode_drafts_by_source_total"
    return {key.split("'")[3] for key in server.metrics() if key.startswith(name)}


def test_a_served_head_changes_nothing_but_who_guessed(tmp_path: Path, eagle3: Path, plain: LLM):
    config = {"method": "eagle3", "model": str(eagle3), "num_speculative_tokens": 3}
    with serving(tmp_path, *speculative(config)) as server:
        assert sources_drafted(server, plain) == {"eagle3"}
        assert exported_sources(server) == {"prediction", "eagle3"}
        assert server.stop() == 0


def test_served_sources_in_a_list_change_nothing_but_who_guessed(
    tmp_path: Path, eagle3: Path, plain: LLM
):
    ngram = {"method": "ngram", "prompt_lookup_min": 1, "branching": 2}
    head = {"method": "eagle3", "model": str(eagle3)}
    config = {"sources": [ngram, {"method": "suffix"}, head], "num_speculative_tokens": 3}
    with serving(tmp_path, *speculative(config)) as server:
        sources = sources_drafted(server, plain)
        assert "eagle3" in sources
        assert sources & {"ngram", "suffix"}
        assert exported_sources(server) == {"prediction", "ngram", "suffix", "eagle3"}
        assert server.stop() == 0
