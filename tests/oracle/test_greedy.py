"""Speculation is invisible at temperature 0: ids equal to transformers' generate, always."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from tests.oracle.engines import (
    BLOCKS,
    FAMILIES,
    HEADS,
    METHODS,
    OF_ONE_SIZE,
    VOCAB_SIZE,
    NoisePolicy,
    checkpoint,
    config,
    engine,
    greedy,
    greedy_oracle,
    ids,
    models,
    parts,
    prompts_of,
    run,
)
from tests.oracle.heads import BLOCK_SIZE, NUM_HEADS
from tests.pairwise import rows

LENGTHS = (3, 21, 40, 9, 33)
NUM_TOKENS = 30


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", range(1, 9))
@pytest.mark.parametrize("method", [m for m in METHODS[1:] if m not in OF_ONE_SIZE])
def test_every_number_of_drafts_equals_transformers(method: str, num_drafts: int):
    if method in HEADS and num_drafts > NUM_HEADS:
        with pytest.raises(ConfigError, match=f"{NUM_HEADS} heads"):
            engine("llama-llama3-rope", method, num_drafts)
        return
    if method in BLOCKS and num_drafts > BLOCK_SIZE - 1:
        with pytest.raises(ConfigError, match=f"no further than {BLOCK_SIZE - 1} tokens ahead"):
            engine("llama-llama3-rope", method, num_drafts)
        return
    llm = engine("llama-llama3-rope", method, num_drafts)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle("llama-llama3-rope", LENGTHS, NUM_TOKENS)


WAYS: dict[str, dict[str, Any]] = {
    "as-it-comes": {},
    "block-size-1": {"block_size": 1, "num_blocks": 400},
    "tiny-chunks": {"block_size": 16, "max_num_batched_tokens": 4},
    "whole-prompts": {"max_num_batched_tokens": 512},
    "no-prefix-cache": {"enable_prefix_caching": False},
    "preempted": {"num_blocks": 6, "enable_prefix_caching": False},
    "preempted-with-prefix-cache": {"num_blocks": 6},
    "one-by-one": {"max_num_seqs": 1},
    "priority": {"scheduling_policy": "priority"},
    "reference-attention": {"kernels": "reference"},
}


@pytest.mark.parametrize(
    ("method", "family", "way"),
    rows(
        product(METHODS, FAMILIES, WAYS),
        lambda method, family, way: (*parts(method), family, way),
    ),
)
def test_every_way_to_run_a_batch_equals_transformers(method: str, family: str, way: str):
    options = WAYS[way]
    llm = engine(family, method, **options)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(family, LENGTHS, NUM_TOKENS)
    if options.get("num_blocks") == 6:
        assert any(output.metrics.num_preemptions for output in outputs)


@pytest.mark.parametrize("method", METHODS)
def test_a_prefix_hit_restores_target_and_drafter(method: str):
    llm = engine("qwen2", method)
    prompts = prompts_of(LENGTHS)
    first = run(llm, prompts, greedy(NUM_TOKENS))
    steps = llm.engine.stats.num_steps
    second = run(llm, prompts, greedy(NUM_TOKENS))
    assert ids(first) == ids(second) == greedy_oracle("qwen2", LENGTHS, NUM_TOKENS)
    assert [output.num_cached_tokens for output in second] == [0, 16, 32, 0, 32]
    assert llm.engine.stats.num_steps <= 2 * steps


@pytest.mark.parametrize(
    "method", ["draft_model", "perfect", "perfect-tree", "combined", "eagle3", "eagle-tree", "pard"]
)
def test_a_drafter_that_paused_catches_up_exactly(method: str):
    """A perfect drafter stays perfect when it drafts in some steps only."""
    llm = engine("llama-llama3-rope", method)
    policy, step = llm.engine.drafting, [0]
    choose = policy.choose

    def now_and_then(requests, num_running, room):
        step[0] += 1
        return choose(requests, num_running, room) if step[0] % 5 in (0, 1) else {}

    policy.choose = now_and_then
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle("llama-llama3-rope", LENGTHS, NUM_TOKENS)
    if method == "perfect":
        assert llm.engine.stats.acceptance_rate == 1.0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), block_size=st.sampled_from([1, 4, 16]))
def test_random_trees_change_nothing(seed: int, block_size: int):
    right = greedy_oracle("mistral-window", LENGTHS, NUM_TOKENS)
    llm = engine("mistral-window", "ngram", num_drafts=16, block_size=block_size, num_blocks=500)
    known = {f"{i}/0": tokens for i, tokens in enumerate(right)}
    llm.engine.drafting = NoisePolicy(llm, known, seed)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == right
    assert llm.engine.stats.num_accepted_tokens > 0


def test_a_request_may_turn_speculation_off_or_down():
    llm = engine("qwen2", "perfect", num_drafts=4)
    wishes = [{}, {"enabled": False}, {"num_speculative_tokens": 2}, {"method": "draft_model"}, {}]
    params = [greedy(NUM_TOKENS, speculation=wish) for wish in wishes]
    outputs = run(llm, prompts_of(LENGTHS), params)
    assert ids(outputs) == greedy_oracle("qwen2", LENGTHS, NUM_TOKENS)
    drafted = [max(o.metrics.speculative_decoding.per_step_drafted, default=0) for o in outputs]
    assert drafted == [4, 0, 2, 4, 4]


@pytest.mark.parametrize("method", ["suffix", "combined"])
def test_predictions_right_and_wrong_change_nothing_but_the_number_of_steps(method: str):
    right = greedy_oracle("mistral-window", LENGTHS, NUM_TOKENS)
    llm = engine("mistral-window", method)
    predictions = [
        right[0],
        None,
        [*right[2][:5], 1, 2, *right[2][6:]],
        right[0],
        [],
    ]
    params = [greedy(NUM_TOKENS, prediction=prediction) for prediction in predictions]
    outputs = run(llm, prompts_of(LENGTHS), params)
    assert ids(outputs) == right
    by_source = [o.metrics.speculative_decoding.accepted_by_source for o in outputs]
    accepted = [sources.get("prediction", 0) for sources in by_source]
    assert accepted[0] > 0.6 * NUM_TOKENS
    assert accepted[2] > 0
    assert accepted[1] == accepted[4] == 0


def test_a_drafter_with_a_short_context_gates_only_the_long_request():
    llm = engine("qwen2", "perfect")
    limits = llm.engine.drafting.limits
    limits._drafter = replace(limits._drafter, max_len=30)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle("qwen2", LENGTHS, NUM_TOKENS)
    steps = [output.metrics.speculative_decoding.num_spec_steps for output in outputs]
    assert steps[0] > 0
    assert steps[2] == 0


@pytest.mark.parametrize("family", ["qwen2", "qwen3-window"])
def test_a_request_at_the_end_of_its_context_harms_no_other(family: str):
    """It drafts fewer tokens than its neighbour, whose passes run on behind its last position."""
    lengths = (91, 5)
    llm = engine(family, "draft_model", num_drafts=4)
    outputs = run(llm, prompts_of(lengths), greedy(40))
    alone = [run(engine(family, "plain"), [p], greedy(40))[0] for p in prompts_of(lengths)]
    assert ids(outputs) == ids(alone)
    assert len(outputs[0].outputs[0].token_ids) == 5


def test_a_tree_deeper_than_the_heads_is_refused_and_beside_other_sources_chains_are_cut():
    medusa = {"method": "medusa", "model": str(checkpoint("qwen2", "medusa"))}
    shared = models("qwen2", ("medusa", medusa["model"]), "float32", "cpu", "auto")
    deep = medusa | {"tree_levels": [1] * (NUM_HEADS + 1)}
    with pytest.raises(ConfigError, match="depth of the tree"):
        LLM.from_config(config("qwen2", {"sources": [{"method": "suffix"}, deep]}), shared)
    wide = medusa | {"tree_levels": [VOCAB_SIZE + 1]}
    with pytest.raises(ConfigError, match=f"vocabulary of the target {VOCAB_SIZE} tokens"):
        LLM.from_config(config("qwen2", wide), shared)
    sources = {"sources": [{"method": "suffix"}, medusa], "num_speculative_tokens": NUM_HEADS + 3}
    llm = LLM.from_config(config("qwen2", sources), shared)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle("qwen2", LENGTHS, NUM_TOKENS)
    assert llm.engine.stats.drafted_by_source[DraftSource.MEDUSA] > 0


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa", "dflash", "dspark"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_deep_trees_are_cut_at_the_end_of_the_context_and_for_who_wants_fewer(
    method: str, dtype: str
):
    """Their levels run on for others, whose texts are shorter or who want more drafts."""
    exact = {"dtype": dtype, "kernels": "reference" if dtype == "float64" else "auto"}
    exact |= {"num_blocks": 200}
    path = str(checkpoint("qwen2", "drafter" if method == "draft_model" else method))
    levels = [2, 2, 1, 1] if method in ("medusa", *BLOCKS) else [2, 2, 1, 1, 1, 1]
    speculative = {"method": method, "model": path, "tree_levels": levels}
    shared = models("qwen2", (method, path), dtype, "cpu", exact["kernels"])
    llm = LLM.from_config(config("qwen2", speculative, **exact), shared)
    prompts = prompts_of((85, 20, 30, 60))
    params = [
        greedy(90),
        greedy(40),
        greedy(40, speculation={"num_speculative_tokens": 1}),
        greedy(90, speculation={"num_speculative_tokens": 3}),
    ]
    outputs = run(llm, prompts, params)
    plain = run(engine("qwen2", "plain", **exact), prompts, params)
    assert ids(outputs) == ids(plain)
    assert len(outputs[0].outputs[0].token_ids) == 96 - 85


def test_heads_draft_from_the_state_of_their_own_text():
    """Nothing is drafted for a prompt of which one token is left: no row of it had logits before.
    Its place still holds the state of whoever had it last."""
    prompt = prompts_of([25])[0]
    params = SamplingParams(
        temperature=1.0, seed=1, max_tokens=8, ignore_eos=True, speculation={"trace": True}
    )
    traces = []
    for others in ((), (12,), (17, 9)):
        llm = engine("qwen2", "medusa", enable_prefix_caching=False)
        if others:
            run(llm, prompts_of(others, seed=4), greedy(6))
        (output,) = run(llm, [prompt], params)
        traces.append((output.outputs[0].token_ids, output.outputs[0].trace))
    steps = traces[0][1]
    assert not steps[0].drafted_ids
    assert any(step.drafted_ids for step in steps)
    assert traces[0] == traces[1] == traces[2]
