"""Whatever live rules leave out of chains, texts are those of plain decoding, and no row is wasted.

Rules are random, of some requests, and change with every step; the policy knows nothing of them.
"""

import pytest
import torch
from msgspec import structs

from outdraft.core.decision import LiveStop
from outdraft.core.plan import DraftChoice
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device import live_stop
from tests.oracle import forms
from tests.oracle.engines import (
    COMBINED,
    NETWORKS,
    engine,
    greedy,
    greedy_oracle,
    ids,
    passes_of,
    prompts_of,
    run,
)
from tests.oracle.live_rules import ComparedRules, LookingRules, RandomRules
from tests.oracle.test_work import Waits

FAMILY, LENGTHS, NUM_TOKENS = "llama-llama3-rope", (5, 21, 12), 20
CHAINS = [name for name in NETWORKS if not name.endswith("-tree")]


@pytest.mark.parametrize("method", [*CHAINS, *COMBINED])
def test_at_temperature_0_every_drafter_gives_the_targets_own_text(method: str):
    llm = engine(FAMILY, method, 4)
    stops = ComparedRules(llm, 1)
    outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert ids(outputs) == greedy_oracle(FAMILY, LENGTHS, NUM_TOKENS)
    assert 0 < stops.num_drafted < stops.num_wanted


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa", "dflash", "dspark"])
def test_seeded_texts_beside_others_are_those_of_plain_decoding(method: str):
    params = [
        SamplingParams(temperature=1.0, seed=3, max_tokens=NUM_TOKENS, ignore_eos=True),
        SamplingParams(temperature=1.0, top_p=0.9, max_tokens=NUM_TOKENS, ignore_eos=True),
        greedy(NUM_TOKENS, logprobs=2),
    ]
    plain = run(engine(FAMILY, "plain"), prompts_of(LENGTHS), params)
    llm = engine(FAMILY, method, 4)
    stops = ComparedRules(llm, 2)
    outputs = run(llm, prompts_of(LENGTHS), params)
    assert [ids(outputs)[at] for at in (0, 2)] == [ids(plain)[at] for at in (0, 2)]
    for got, want in zip(
        outputs[2].outputs[0].logprobs or (), plain[2].outputs[0].logprobs or (), strict=True
    ):
        assert got.keys() == want.keys()
    assert 0 < stops.num_drafted < stops.num_wanted


def test_a_perfect_drafter_stays_perfect():
    """Its cache holds what it has read of chains that ended early and were accepted whole."""
    llm = engine(FAMILY, "perfect", 4)
    stops = ComparedRules(llm, 3)
    run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert llm.engine.stats.acceptance_rate == 1.0
    assert 0 < stops.num_drafted < stops.num_wanted


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "combined"])
def test_rows_that_were_not_drafted_are_not_computed(method: str):
    llm = engine("qwen3-window", method, 4)
    stops, planned, schedule = ComparedRules(llm, 4), [], llm.engine.scheduler.schedule
    llm.engine.scheduler.schedule = lambda *args, **named: (
        planned.append(schedule(*args, **named)),
        planned[-1],
    )[1]
    with passes_of(llm) as passes:
        run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    num_computed = sum(one.num_rows for one in passes)
    stats, left_out = llm.engine.stats, stops.num_wanted - stops.num_drafted
    assert num_computed == stats.num_rows == sum(one.plan.num_rows for one in planned) - left_out
    assert left_out > 0


@pytest.mark.parametrize(
    "method", ["draft_model", "eagle3", "mlp_speculator", "dspark", "combined-eagle3"]
)
def test_margins_are_told_without_waiting(method: str, monkeypatch):
    """As on a GPU: nothing is read back, all planned rows are computed, the text is the same."""
    monkeypatch.setattr(live_stop, "host_sees", lambda device: False)
    llm = engine("qwen2", method, 4, kernels="reference")
    stops = LookingRules(llm, 5)
    with Waits() as waits, torch.inference_mode():
        outputs = run(llm, prompts_of(LENGTHS), greedy(NUM_TOKENS))
    assert waits.seen == []
    assert ids(outputs) == greedy_oracle("qwen2", LENGTHS, NUM_TOKENS)
    assert (stops.num_short, stops.num_told > 5) == (0, True)


class Stopping(RandomRules):
    """All chains end before their first draft."""

    def _with_rule(self, choice: DraftChoice, cap: int) -> DraftChoice:
        number = choice.num_model_drafts
        stop = LiveStop((0.0,) * number, (-5.0,) * number, price=0.5, row_cap=cap)
        return structs.replace(choice, stop=stop) if number else choice


@pytest.mark.slow
def test_a_grammar_holds_where_the_rule_leaves_no_draft():
    form = forms.regex(forms.REGEXES[0])
    prompt = forms.PROMPTS[:1]
    plain = forms.engine("plain").generate(prompt, forms.asking(form), use_tqdm=False)
    llm = forms.engine("perfect")
    stops = Stopping(llm, 0)
    outputs = llm.generate(prompt, forms.asking(form), use_tqdm=False)
    assert ids(outputs) == ids(plain)
    assert stops.num_short > 5


@pytest.mark.parametrize("form", [forms.regex(one) for one in forms.REGEXES[:2]])
def test_outputs_keep_to_their_grammar(form: forms.Form):
    params = [forms.asking(form), forms.asking(form, temperature=1.0, seed=None)]
    params += [SamplingParams(temperature=0.0, max_tokens=20)]
    plain = forms.engine("plain").generate(forms.PROMPTS, params, use_tqdm=False)
    llm = forms.engine("perfect")
    stops = ComparedRules(llm, 6)
    outputs = llm.generate(forms.PROMPTS, params, use_tqdm=False)
    assert all(form.is_met(output.outputs[0].text) for output in outputs[:2])
    assert [ids(outputs)[at] for at in (0, 2)] == [ids(plain)[at] for at in (0, 2)]
    assert stops.num_drafted < stops.num_wanted
