"""A self-test passes what is exact, and finds what is not."""

from dataclasses import replace

import numpy as np
import pytest

from outdraft import assets
from outdraft.bench.driver import complete_alone
from outdraft.bench.selftest import (
    ALWAYS,
    LEAST_P,
    SPECULATIVE,
    first_difference,
    fit,
    self_test,
)
from outdraft.bench.side_by_side import PLAIN, share_target
from outdraft.bench.sweep import SyntheticVerifier
from outdraft.config.engine import EngineConfig, SchedulerConfig
from outdraft.config.speculation import parse_speculative_config
from outdraft.core.sampling import SamplingParams
from outdraft.engine.build import build_engine
from tests.cli.pair import PROMPTS, completed, pair


def findings(biased=None):
    """Findings about the trained pair: what random weights say is too even to be told apart.

    biased: an engine that keeps every sampled draft; both that draft have fixed lengths then.
    """
    base = replace(
        EngineConfig.from_options(model=str(assets.target_path()), device="cpu", max_model_len=512),
        scheduler=SchedulerConfig(max_num_seqs=16),
    )
    drafter = str(assets.drafter_path())
    given = {"method": "draft_model", "model": drafter, "num_speculative_tokens": 3}
    always = parse_speculative_config(given | {"control": "fixed"})
    own = always if biased else parse_speculative_config(given)
    configs = {
        PLAIN: base,
        SPECULATIVE: replace(base, speculation=own),
        ALWAYS: replace(base, speculation=always, seed=1),
    }
    models = share_target(configs)
    engines = {name: build_engine(one, models[name])[0] for name, one in configs.items()}
    if biased is not None:
        kernels = models[PLAIN].kernels
        engines[biased].runner.verifier = SyntheticVerifier(kernels, "block", (1.0,))
    texts = [text for _, text in assets.prompts()[:3]]
    return self_test(engines, texts, max_tokens=8, num_samples=200, num_sampled_prompts=1)


@pytest.mark.slow
def test_exact_speculation_passes():
    result = findings()
    assert result["passed"]
    assert result["differences"] == []
    assert result["num_samples"] == 400
    assert result["num_beginnings"] >= 2  # the prompt alone, for both engines
    assert result["speed"]["acceptance_length"] >= 1


@pytest.mark.parametrize("biased", [SPECULATIVE, ALWAYS])
def test_drafts_that_are_always_kept_are_found_by_the_counts(biased):
    result = findings(biased)
    assert not result["passed"]
    assert result["p_value"] < LEAST_P


def test_a_text_that_parts_is_found_with_the_gap_between_the_two_tokens():
    config = EngineConfig.from_options(model=str(pair().target), device="cpu")
    engine, _ = build_engine(config)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=3)
    output = complete_alone(engine, "0", PROMPTS[0], params).output.outputs[0]
    second_id, second = max(
        ((i, one) for i, one in output.logprobs[4].items() if i != output.token_ids[4]),
        key=lambda pair: pair[1].logprob,
    )
    other = [*output.token_ids[:4], second_id, 0]
    samples = {
        PLAIN: [completed(output.token_ids)],
        ALWAYS: [completed(other)],
    }
    found = first_difference(engine, PROMPTS[0], 0, ALWAYS, samples)
    best = output.logprobs[4][output.token_ids[4]]
    assert (found["engine"], found["prompt"], found["place"]) == (ALWAYS, 0, 4)
    assert (found["plain_id"], found["speculative_id"]) == (output.token_ids[4], second_id)
    assert found["gap"] == pytest.approx(best.logprob - second.logprob, abs=1e-5)
    assert first_difference(engine, PROMPTS[0], 0, PLAIN, samples) is None


@pytest.mark.slow
def test_p_values_of_true_chances_are_even_and_of_wrong_ones_small():
    rng = np.random.default_rng(5)
    chances = np.array([0.5, 0.3, 0.15, 0.05])
    p_values = [fit([(rng.multinomial(60, chances), chances) for _ in range(3)]) for _ in range(60)]
    assert abs(np.mean(p_values) - 0.5) < 0.15
    assert np.mean(np.array(p_values) < 0.1) < 0.25
    biased = np.array([0.4, 0.4, 0.15, 0.05])
    assert fit([(rng.multinomial(2000, biased), chances)]) < LEAST_P
    impossible = np.array([1.0, 0.0])
    assert fit([(np.array([50, 1]), impossible)]) < LEAST_P
    assert fit([]) == 1
