"""Replays of recorded requests: drafts fare as they did, time is what the table says."""

import json
from pathlib import Path

import numpy as np
import pytest

from outdraft.config.speculation import SpeculationConfig, parse_speculative_config
from outdraft.control.costs import CostCurve, CostTable, DrafterCost
from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.recorded import RecordedRequest, RecordedStep
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.loading.methods import host_proposers
from outdraft.planning.replay import Replay, with_length
from outdraft.planning.replay_scores import plain_run, recorded_score, score
from tests.oracle.engines import engine, greedy, greedy_oracle, prompts_of
from tests.planning.recording import drafted_by_network, made_up, record

FAMILY = "qwen2"
LENGTHS = (20, 30, 12)
FIXED = (1, 2, 3, 5, 7)  # drafts
TABLE = CostTable(
    CostCurve((1, 16), (1.0, 2.5)),
    context_s=0.001,
    request_s=0.01,
    drafters={
        "draft_model": DrafterCost(CostCurve((1, 8), (0.1, 0.17)), CostCurve((1,), (0.0,)), 0.05)
    },
    host_s=0.02,
    host_request_s=0.003,
)
CHAINS = {"method": "draft_model", "model": "recorded"}


def network(length: int | str = 7, **changes) -> SpeculationConfig:
    return parse_speculative_config(CHAINS | {"num_speculative_tokens": length} | changes)


def replayed(llm: LLM, requests: list[RecordedRequest], concurrency: int = 1) -> Replay:
    config = llm.config.speculation
    proposers = host_proposers(config.sources, llm.models.kernels)
    return Replay(requests, concurrency, config, proposers).run()


def assert_same_steps(run: Replay, requests: list[RecordedRequest]) -> None:
    """Every step of every text drafted and accepted as many tokens as the engine's."""
    outputs = [output for request in requests for output in request.outputs]
    for text, output in zip(run.texts, outputs, strict=True):
        assert text.request.token_ids[text.request.num_prompt :].tolist() == output.token_ids
        assert text.steps == [
            (step.tokens, sum(step.drafted.values()), sum(step.accepted.values()))
            for step in output.steps
        ]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("method", ["suffix", "ngram", "suffix-tree", "ngram-tree"])
def test_a_replay_drafts_and_accepts_in_each_step_what_the_engine_did(
    method: str, temperature: float, tmp_path: Path
):
    """A seeded text is the same whatever is drafted."""
    llm = engine(FAMILY, method, 5, max_num_batched_tokens=64)
    prompts = prompts_of([*LENGTHS, *LENGTHS])  # the second time, finished texts are known
    params = [greedy(60)] * len(prompts)
    if temperature:
        params = [
            SamplingParams(temperature=temperature, seed=seed % 3, max_tokens=60, ignore_eos=True)
            for seed in range(len(prompts))
        ]
    requests = record(llm, prompts, params, tmp_path / "trace.jsonl")
    assert sum(step.accepted != {} for one in requests for step in one.outputs[0].steps) > 3
    assert_same_steps(replayed(llm, requests), requests)


def test_texts_side_by_side_are_replayed_as_they_ran(tmp_path: Path):
    llm = engine(FAMILY, "suffix", 5, max_num_batched_tokens=64)
    prompts = prompts_of([*LENGTHS, *LENGTHS])
    params = [greedy(20 + 7 * number) for number in range(len(prompts))]
    requests = record(llm, prompts, params, tmp_path / "trace.jsonl", concurrency=2)
    assert_same_steps(replayed(llm, requests, concurrency=2), requests)


def test_predictions_and_wishes_of_clients_are_replayed(tmp_path: Path):
    llm = engine(FAMILY, "suffix", 5, max_num_batched_tokens=64)
    prompt, right = prompts_of(LENGTHS)[0], greedy_oracle(FAMILY, LENGTHS, 60)[0]
    wrong = [*right[:20], *right[24:40], 7, 7, *right[40:]]
    params = [
        greedy(60, prediction=right),
        greedy(60, prediction=wrong),
        greedy(60, prediction=right, speculation={"method": "suffix"}),
        greedy(60, speculation={"enabled": False}),
        greedy(60, speculation={"num_speculative_tokens": 2}),
    ]
    requests = record(llm, [prompt] * len(params), params, tmp_path / "trace.jsonl")
    run = replayed(llm, requests)
    assert_same_steps(run, requests)
    assert "prediction" in run.stats.drafted_by_source
    assert all(drafted == 0 for _, drafted, _ in run.texts[3].steps)


def test_texts_that_ended_early_are_replayed_to_their_end_and_aborted_ones_teach_nothing(
    tmp_path: Path,
):
    """A stop token, a stop string, and a reader that left in the middle of the text."""
    llm = engine(FAMILY, "suffix", 5, max_num_batched_tokens=64)
    prompt, text = prompts_of(LENGTHS)[0], greedy_oracle(FAMILY, LENGTHS, 60)[0]
    params = [
        greedy(60),
        greedy(60, stop_token_ids=[text[25]]),
        greedy(60, stop=f"w{text[17]}"),
        greedy(60),
    ]
    requests = record(
        llm, [prompt] * len(params), params, tmp_path / "trace.jsonl", aborted_at={0: 13}
    )
    ends = [request.outputs[0].finish_reason for request in requests]
    assert ends == ["abort", "stop", "stop", "length"]
    assert_same_steps(replayed(llm, requests), requests)
    without = replayed(llm, requests[1:])
    assert [text.steps for text in without.texts] == [
        text.steps for text in replayed(llm, requests).texts[1:]
    ]


def test_a_request_that_was_aborted_before_its_first_token_only_reads_its_prompt():
    requests = [
        made_up([], [], finish_reason="abort"),
        made_up([5, 6], [RecordedStep(1)] * 2),
    ]
    run = Replay(requests, 1, SpeculationConfig(), ()).run()
    assert [text.request.num_output for text in run.texts] == [0, 2]
    assert run.stats.num_steps == 3


def test_plain_decoding_takes_what_the_table_says():
    texts = [made_up([9] * 5, [RecordedStep(1)] * 5), made_up([8] * 3, [RecordedStep(1)] * 3)]
    run = plain_run(texts, 2, TABLE)

    def step_s(rows: int, context: int, count: int) -> float:
        target_s = 1.0 + 0.1 * (rows - 1) + 0.001 * context + 0.01 * (count - 1)
        return target_s + 0.02 + 0.003 * (count - 1)

    # Both prompts, then two texts of 5 and 6 tokens; then one of them goes on to 5 outputs.
    times = [step_s(8, 8, 2), step_s(2, 10, 2), step_s(2, 12, 2), step_s(1, 7, 1), step_s(1, 8, 1)]
    assert run.busy_s == pytest.approx(sum(times))
    assert run.tokens_per_s == pytest.approx(8 / sum(times))
    assert run.tpot_ms == pytest.approx(500 * (sum(times[1:]) / 4 + sum(times[1:3]) / 2))


def test_drafts_of_a_network_take_its_passes_and_their_rows():
    rng = np.random.default_rng(1)
    request = drafted_by_network(rng, 60, 3, 0.6)
    run = Replay([request], 1, with_length(network(), 3), (), TABLE).run()
    [text] = run.texts
    seconds, length = 1.3 + 0.004 + 0.02, 4
    for _, drafted, accepted in text.steps[1:]:
        length += 1
        target_s = 1.0 + 0.1 * drafted + 0.001 * length
        seconds += target_s + 0.02 + (0.05 + 0.1 * drafted if drafted else 0.0)
        length += accepted
    assert run.busy_s == pytest.approx(seconds)


@pytest.mark.parametrize("chance", [0.2, 0.7, 0.95])
def test_networks_are_as_lucky_as_they_were(chance: float):
    rng = np.random.default_rng(2)
    requests = [drafted_by_network(rng, 400, 4, chance) for _ in range(8)]
    recorded = recorded_score(requests)
    assert recorded["level_chances"]["draft_model"][0] == pytest.approx(chance, abs=0.05)
    run = Replay(requests, 4, with_length(network(), 4), ()).run()
    expected = 1 + sum(chance**level for level in range(1, 5))
    assert run.stats.acceptance_length == pytest.approx(expected, rel=0.06)


def test_requests_come_when_they_came_and_idle_time_is_not_busy():
    texts = [
        made_up([9] * 3, [RecordedStep(1)] * 3, arrival_s=50.0),
        made_up([8] * 3, [RecordedStep(1)] * 3, arrival_s=51.5),
        made_up([7] * 2, [RecordedStep(1)] * 2, arrival_s=150.0),
    ]
    run = plain_run(texts, None, CostTable(CostCurve((1,), (1.0,))))
    first, second, third = run.texts
    assert (first.first_s, first.end_s) == (1.0, 3.0)
    assert (second.first_s, second.end_s) == (3.0, 5.0)
    assert (third.first_s, third.end_s) == (101.0, 102.0)
    assert run.elapsed_s == 102.0
    assert run.busy_s == 7.0


@pytest.mark.slow
def test_the_controller_is_never_far_below_the_best_fixed_length():
    """Networks that pay, that never pay, and that pay for short drafts only."""
    rng = np.random.default_rng(3)
    for chance, pass_s in ((0.9, 0.05), (0.1, 0.5), (0.7, 0.3)):
        requests = [drafted_by_network(rng, 700, 5, chance) for _ in range(12)]
        cost = DrafterCost(CostCurve((1,), (pass_s,)), CostCurve((1,), (0.0,)))
        table = CostTable(CostCurve((1, 16), (1.0, 1.6)), drafters={"draft_model": cost})
        runs = score(requests, 4, network(7), lambda chosen: (), table, FIXED)["runs"]
        assert [run["name"] for run in runs] == [
            "plain", "fixed 1", "fixed 2", "fixed 3", "fixed 5", "fixed 7", "adaptive",
        ]  # fmt: skip
        best = max(run["tokens_per_s"] for run in runs if run["length"] is not None)
        assert runs[-1]["length"] is None
        assert runs[-1]["tokens_per_s"] >= 0.97 * best, (chance, runs)


def test_heads_have_no_more_lengths_than_the_trace_has_levels():
    rng = np.random.default_rng(6)
    requests = [drafted_by_network(rng, 200, 4, 0.5, DraftSource.MEDUSA) for _ in range(2)]
    cost = DrafterCost(CostCurve((1,), (0.1,)), CostCurve((1,), (0.0,)), max_passes=1)
    table = CostTable(CostCurve((1, 16), (1.0, 1.6)), drafters={"medusa": cost})
    runs = score(requests, 1, network(method="medusa"), lambda chosen: (), table, FIXED)["runs"]
    assert [run["length"] for run in runs] == [0, 1, 2, 3, 4, None]


def test_two_replays_say_the_same_even_where_deciding_takes_as_long_as_a_step():
    rng = np.random.default_rng(4)
    requests = [drafted_by_network(rng, 200, 5, 0.7) for _ in range(4)]
    cost = DrafterCost(CostCurve((1,), (1e-5,)), CostCurve((1,), (0.0,)))
    table = CostTable(CostCurve((1, 16), (1e-4, 1.6e-4)), drafters={"draft_model": cost})

    def told() -> str:
        return json.dumps(score(requests, 2, network(), lambda _: (), table, FIXED))

    assert told() == told()


def test_networks_that_nobody_recorded_or_measured_are_named():
    rng = np.random.default_rng(5)
    requests = [drafted_by_network(rng, 50, 3, 0.5)]
    with pytest.raises(ConfigError, match="no drafts of eagle3"):
        Replay(requests, None, network(method="eagle3"), ())
    bare = CostTable(CostCurve((1,), (1.0,)))
    with pytest.raises(ConfigError, match="nothing of the passes of draft_model"):
        Replay(requests, None, network(), (), bare)


def test_a_tree_is_replayed_by_its_levels():
    """Rows 2 + 3 + 1; a step that accepted two levels and one that accepted all three."""
    drafts = {"eagle3": 6}
    steps = [
        RecordedStep(1),
        RecordedStep(3, drafts, {"eagle3": 2}),
        RecordedStep(4, drafts, {"eagle3": 3}),
        RecordedStep(1),
    ]
    request = made_up(list(range(10, 19)), steps, tree=[2, 3, 1])
    config = parse_speculative_config(
        {"method": "eagle3", "model": "recorded", "tree_levels": [2, 3, 1]}
    )
    run = Replay([request] * 20, 1, with_length(config, 6), ()).run()
    assert {drafted for text in run.texts for _, drafted, _ in text.steps} <= {0, 2, 5, 6}
    chances = recorded_score([request] * 20)["level_chances"]["eagle3"]
    assert min(chances[:2]) > 0.9
    assert chances[2] == pytest.approx(0.5, abs=0.2)
