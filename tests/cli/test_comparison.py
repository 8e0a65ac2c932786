"""The demo's numbers are what a reader thinks they are."""

import time
from dataclasses import replace

import pytest

from outdraft.bench.side_by_side import (
    NUM_DRAFTS,
    PLAIN,
    are_identical,
    as_json,
    complete_in_turn,
    method_configs,
)
from outdraft.cli.demo import load
from outdraft.core.draft import DraftSource
from outdraft.core.outputs import TargetChoice
from outdraft.core.sampling import SamplingParams
from outdraft.engine.stats import StatsTotal
from tests.cli.pair import PROMPTS, completed

MAX_TOKENS = 14


@pytest.fixture(scope="module")
def llms():
    from tests.cli.pair import pair

    configs = method_configs(pair().target, pair().drafter, pair().heads)
    return load(
        {  # random models would soon not draft at all
            name: replace(one, speculation=replace(one.speculation, control="fixed"))
            for name, one in configs.items()
        }
    )


@pytest.fixture(scope="module", params=[0.0, 0.8])
def temperature(request):
    return request.param


def compare(engines, warm_up, prompts, temperature, on_step):
    """As the demo does: each prompt has a seed."""
    params = [
        SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=number)
        for number in range(len(prompts))
    ]
    return complete_in_turn(engines, warm_up, prompts, params, on_step=on_step)


@pytest.fixture(scope="module")
def compared(llms, temperature):
    """Samples of each method, and the (method, tokens so far) that were reported step by step."""
    seen = []

    def on_step(name, output):
        seen.append((name, list(output.outputs[0].token_ids)))

    engines = {name: llm.engine for name, llm in llms.items()}
    return compare(engines, PROMPTS[3], PROMPTS[:2], temperature, on_step), seen


def test_no_method_changes_what_plain_decoding_gives(llms, temperature, compared):
    by_method, _ = compared
    params = [
        SamplingParams(temperature=temperature, max_tokens=MAX_TOKENS, seed=number)
        for number in range(2)
    ]
    outputs = llms[PLAIN].generate(list(PROMPTS[:2]), params, use_tqdm=False)
    expected = [output.outputs[0].token_ids for output in outputs]
    assert list(by_method) == list(llms)
    for samples in by_method.values():
        assert [one.token_ids for one in samples] == expected


def test_all_methods_take_their_turn_at_each_prompt(llms, compared):
    by_method, seen = compared
    finished = [
        name
        for (name, ids), after in zip(seen, [*seen[1:], (None, [])], strict=True)
        if len(after[1]) <= len(ids) or after[0] != name
    ]
    assert finished == [*llms, *llms]
    assert [ids for name, ids in seen if name == PLAIN][-1] == by_method[PLAIN][-1].token_ids


def test_the_warm_up_is_not_counted_and_neither_is_a_prompts_first_token(compared):
    by_method, _ = compared
    for samples in by_method.values():
        assert len(samples) == 2
        num_tokens = sum(len(one.token_ids) for one in samples)
        assert 2 * MAX_TOKENS - 4 <= num_tokens <= 2 * MAX_TOKENS  # an end token may come
        assert sum(one.num_decoded for one in samples) == num_tokens - 2
        assert sum(len(one.origins) for one in samples) == num_tokens
        assert all(one.decode_s > 0 for one in samples)


def test_the_time_that_watching_takes_is_not_counted(llms):
    watched_s = 0.0

    def on_step(name, output):
        nonlocal watched_s
        started_s = time.perf_counter()
        time.sleep(0.01)
        watched_s += time.perf_counter() - started_s

    started_s = time.perf_counter()
    engines = {PLAIN: llms[PLAIN].engine}
    [one] = compare(engines, PROMPTS[3], PROMPTS[2:3], 0.0, on_step)[PLAIN]
    assert 0 < one.decode_s < time.perf_counter() - started_s - watched_s


def test_drafted_and_accepted_tokens_add_up_to_the_origins(compared):
    by_method, _ = compared
    assert all(one.decode_stats.num_draft_tokens == 0 for one in by_method[PLAIN])
    assert {origin for one in by_method[PLAIN] for origin in one.origins} == {TargetChoice.PLAIN}
    model = by_method["draft_model"]
    stats = [one.decode_stats for one in model]
    num_accepted = sum(one.num_accepted_tokens for one in stats)
    assert num_accepted == sum(one.origins.count(DraftSource.MODEL) for one in model)
    num_drafts = sum(one.num_drafts for one in stats)
    assert 0 < sum(one.num_draft_tokens for one in stats) <= NUM_DRAFTS * num_drafts


def test_plain_decoding_has_no_drafter_and_no_method_a_prefix_cache(llms):
    assert llms[PLAIN].memory.drafter_weights == 0
    assert llms["combined"].memory.drafter_weights > 0
    assert not any(llm.config.cache.enable_prefix_caching for llm in llms.values())
    assert len({id(llm.models.target) for llm in llms.values()}) == 1


def sample(num_decoded, decode_s, *steps):
    """A prompt that was completed in speculative steps: (drafted, accepted)."""
    stats = StatsTotal(
        num_drafts=len(steps),
        num_draft_tokens=sum(drafted for drafted, _ in steps),
        num_accepted_tokens=sum(accepted for _, accepted in steps),
    )
    return completed([], num_decoded, decode_s, stats)


def test_rates_are_aggregated_over_prompts_not_averaged():
    samples = [sample(9, 0.9, (4, 4), (4, 0)), sample(9, 0.1, (2, 2))]
    found = as_json({PLAIN: [sample(9, 1.0)], "suffix": samples})["methods"]["suffix"]
    assert found["tokens_per_s"] == pytest.approx(18.0)
    assert found["tpot_ms"] == pytest.approx(1000 / 18)
    assert found["acceptance_rate"] == pytest.approx(6 / 10)
    assert found["acceptance_length"] == pytest.approx(1 + 6 / 3)
    assert found["speedup"] == pytest.approx(2.0)


def of_ids(*token_ids):
    return [completed(ids) for ids in token_ids]


def test_a_single_different_token_is_reported():
    plain, other = of_ids([1, 2], [3]), of_ids([1, 2], [4])
    report = as_json({PLAIN: plain, "suffix": other})
    assert report["methods"]["suffix"]["identical"] is False
    assert are_identical(plain, of_ids([1, 2], [3]))
    assert not are_identical(plain, of_ids([1, 2]))


def test_nothing_decoded_is_zero_speed_not_an_error():
    report = as_json({PLAIN: [], "suffix": []})
    assert report["plain"] == {"tokens_per_s": 0.0, "tpot_ms": 0.0}
    assert report["methods"]["suffix"]["speedup"] == 0.0
