"""Engines that take turns are measured one by one, and share what they can."""

import pytest

from outdraft.bench import side_by_side
from outdraft.bench.driver import EngineRun, complete_alone
from outdraft.bench.side_by_side import (
    PLAIN,
    complete_in_turn,
    median_speed,
    method_configs,
    ms_per_step,
    share_target,
    sum_of_drafts,
)
from outdraft.core.sampling import SamplingParams
from outdraft.engine.build import build_engine
from outdraft.engine.stats import StatsTotal
from tests.cli.pair import PROMPTS, completed, pair

MAX_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def models():
    return share_target(configs())


def configs():
    return method_configs(pair().target, pair().drafter, pair().heads)


def test_there_is_one_target_and_each_network_once(models, monkeypatch):
    assert len({id(one.target) for one in models.values()}) == 1
    assert models["combined"].drafter is models["draft_model"].drafter
    networks = [models[name].drafter for name in ("draft_model", *pair().heads)]
    assert len({id(one.network) for one in networks}) == len(networks)
    assert models[PLAIN].drafter is None
    assert models["suffix"].drafter is None


def test_a_sample_is_what_the_engine_generates_and_its_steps_without_the_prompts(models):
    names = (PLAIN, "draft_model", "medusa", "ngram")
    engines = {name: build_engine(configs()[name], models[name])[0] for name in names}
    done = []
    samples = complete_in_turn(
        engines, PROMPTS[3], PROMPTS[:2], [GREEDY] * 2, lambda: done.append(1)
    )
    assert len(done) == 4 * 3
    for own in samples.values():
        assert [one.token_ids for one in own] == [one.token_ids for one in samples[PLAIN]]
        for one in own:
            assert len(one.token_ids) == MAX_TOKENS
            assert one.num_decoded == one.decode_stats.num_emitted == MAX_TOKENS - 1
            assert one.decode_s > one.decode_stats.verify_s > 0
    for one in samples[PLAIN]:
        assert (one.decode_stats.num_steps, one.decode_stats.num_drafts) == (MAX_TOKENS - 1, 0)
    assert all(one.decode_stats.num_drafts > 0 for one in samples["draft_model"])
    assert all(engine.on_step is None for engine in engines.values())


def test_engines_take_turns_prompt_by_prompt(models, monkeypatch):
    engines = {n: build_engine(configs()[n], models[n])[0] for n in (PLAIN, "suffix")}
    turns = []
    alone = side_by_side.complete_alone

    def spied(engine, request_id, prompt, *rest):
        turns.append((next(n for n, e in engines.items() if e is engine), prompt))
        return alone(engine, request_id, prompt, *rest)

    monkeypatch.setattr(side_by_side, "complete_alone", spied)
    complete_in_turn(engines, PROMPTS[3], PROMPTS[:2], [GREEDY] * 2)
    order = (PROMPTS[3], *PROMPTS[:2])
    assert turns == [(name, prompt) for prompt in order for name in (PLAIN, "suffix")]


def test_a_completion_that_advances_step_by_step_ends_with_the_same_text(models):
    engine = build_engine(configs()[PLAIN], models[PLAIN])[0]
    whole = complete_alone(engine, "0", PROMPTS[0], GREEDY)
    lengths = []
    asked = [("1", PROMPTS[0], GREEDY, 0)]
    one = EngineRun(engine, asked, lambda output: lengths.append(one.num_decoded))
    turns = 0
    while not one.is_over:
        one.advance(1e-9)  # a turn is a step
        turns += 1
    assert lengths == list(range(MAX_TOKENS))
    assert turns == MAX_TOKENS
    assert one.output.outputs[0].token_ids == whole.output.outputs[0].token_ids
    assert (one.num_decoded, whole.num_decoded) == (MAX_TOKENS - 1,) * 2
    assert one.elapsed_s > one.decode_s > 0
    assert not engine.has_work


def sample(num_decoded, decode_s, *, steps=1, drafts=0, accepted=0, draft_s=0.0):
    stats = StatsTotal(
        num_steps=steps, num_drafts=drafts, num_accepted_tokens=accepted, draft_s=draft_s
    )
    return completed([], num_decoded, decode_s, stats)


def test_speeds_are_medians_and_ratios_are_taken_prompt_by_prompt():
    own = [sample(10, 1.0), sample(10, 0.1), sample(10, 2.0)]
    base = [sample(10, 2.0), sample(10, 0.2), sample(10, 0.5)]
    assert median_speed(own, base) == pytest.approx((10.0, 2.0))
    assert median_speed([sample(0, 0.0)], [sample(0, 0.0)]) == (0.0, 0.0)


def test_acceptance_length_is_over_all_drafts_and_one_without_any():
    own = [sample(9, 1.0, drafts=1, accepted=4), sample(9, 1.0, drafts=3, accepted=0)]
    assert sum_of_drafts(own).acceptance_length == pytest.approx(2.0)
    assert sum_of_drafts([sample(9, 1.0)]).acceptance_length == 1.0


def test_a_phase_is_milliseconds_a_step():
    own = [sample(9, 1.0, steps=n, draft_s=s) for n, s in ((2, 0.004), (4, 0.004), (1, 0.5))]
    assert ms_per_step(own, "draft") == pytest.approx(2.0)
