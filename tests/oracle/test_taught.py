"""What a network that catches up tells of itself is what it would have drafted: by dense passes.

The embedded networks pause, and draft again. For each token that they are compared with, the oracle
reads the whole text up to it at once, with the weights of the network and of the target.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outdraft import assets
from outdraft.config.engine import EngineConfig
from outdraft.control.facts import (
    CHAIN,
    Decision,
    Grant,
    RequestFacts,
    Shape,
    StepFacts,
    StepOutcome,
)
from outdraft.core.draft import MAX_TAUGHT
from outdraft.core.plan import StepPlan
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM
from outdraft.engine.loading import load_models
from outdraft.models.eagle import EagleNetwork
from outdraft.models.llama import CausalLM
from outdraft.models.medusa import MedusaHeads
from outdraft.models.mlp_speculator import MLPSpeculator
from outdraft.runner.model_runner import PendingStep
from tests.attention.causal import causal_metadata
from tests.oracle.changing_lengths import ChangingLengths
from tests.oracle.engines import run
from tests.oracle.test_kept_states import cache_of, read_afresh

METHODS = ("draft_model", "eagle3", "medusa", "mlp_speculator")
PROMPTS, NUM_TOKENS = 3, 44
# Steps without drafts: two pauses that are long enough, and one that is not.
OFF = {*range(2, 14), *range(16, 21), *range(23, 26)}


@dataclass(frozen=True)
class Taught:
    """What one outcome said.

    Attributes:
        step: that it belongs to.
        num_tokens: of the text when the network drafted.
    """

    request_id: str
    step: int
    num_tokens: int
    count: int
    right: int


class Pausing(ChangingLengths):
    """Two levels in every step but those of `off`; remembers what it was taught."""

    def __init__(self, off: set[int]) -> None:
        super().__init__(0)
        self._off, self._step = off, -1
        self.taught: list[Taught] = []

    @property
    def wants_offers(self) -> bool:
        return False

    @property
    def wants_margins(self) -> bool:
        return True

    def try_hold(self, num_requests: int, prompt_rows: int = 0) -> bool:
        return False

    def decide(self, facts: StepFacts) -> Decision:
        self._step += 1
        decision = super().decide(facts)
        self.wants_outcome = True
        return decision

    def observe(self, outcome: StepOutcome) -> None:
        super().observe(outcome)
        lengths = {one.request_id: one.context_tokens for one in outcome.facts.requests}
        for one in outcome.drafts:
            assert 0 <= one.taught_accepted <= one.taught
            if one.taught:
                told = one.taught, one.taught_accepted
                name = one.request_id
                self.taught.append(Taught(name, self._step, lengths[name], *told))

    def _grant(self, one: RequestFacts, network_shape: Shape | None) -> Grant | None:
        if self._step in self._off or one.network is None or one.max_drafts < 2:
            return None
        return Grant(one.request_id, one.network, 2, 2, 0.0, 0, one.rule, CHAIN)


@cache
def engine_of(method: str) -> LLM:
    path = assets.drafter_path() if method == "draft_model" else assets.head_path(method)
    return engine_with(method, path)


def engine_with(method: str, path: Path, **options: Any) -> LLM:
    config = EngineConfig.from_options(
        model=str(assets.target_path()),
        speculative_config={"method": method, "model": str(path), "control": "fixed"} | options,
        dtype="float64",
        device="cpu",
        kernels="reference",
        max_num_seqs=PROMPTS,
        num_blocks=200,
        cost_table="roofline",
    )
    return LLM.from_config(config, load_models(config))


def taught_by(
    llm: LLM, off: set[int], *params: SamplingParams
) -> tuple[list[Taught], dict[str, Tensor]]:
    """What a run teaches; its texts by request."""
    control = llm.engine.drafting.control = Pausing(off)
    prompts = [llm.get_tokenizer().encode(one.text)[:32] for one in assets.prompts()[:PROMPTS]]
    several = [replace(params[i % len(params)], max_tokens=NUM_TOKENS) for i in range(PROMPTS)]
    outputs = run(llm, prompts, several)
    found = {
        f"{output.request_id}/0": torch.tensor(
            [*output.prompt_token_ids, *output.outputs[0].token_ids]
        )
        for output in outputs
    }
    return control.taught, found


def first_drafts(llm: LLM, text: Tensor) -> Tensor:
    """int64, by place in the text from 2 on: what the network drafts of it, best token first."""
    network, target = llm.models.drafter.network, llm.models.target
    if isinstance(network, CausalLM):
        return network.logits(read_afresh(network, text[:-1], ())[0][1:]).argmax(1)
    count = len(text) - 2
    if isinstance(network, MedusaHeads):
        hidden_TD, _ = read_afresh(target, text[:count], ())
        return network.logits(hidden_TD, range(1))[:, 0].argmax(1)
    if isinstance(network, MLPSpeculator):
        first_RS = network.first_state(read_afresh(target, text[:count], ())[0])
        return network.logits(0, network.step(0, first_RS, text[1:-1])).argmax(1)
    assert isinstance(network, EagleNetwork)
    features = network.features(*read_afresh(target, text[:count], network.taps))
    batch = causal_metadata(0, count, torch.arange(count), torch.zeros(1).int())
    layers = cache_of(network.config.layer, count).layers
    return network.logits(network(text[1:-1], features, layers, batch)).argmax(1)


@torch.inference_mode()
def num_right(llm: LLM, texts: dict[str, Tensor], one: Taught) -> int:
    """How many of the tokens that it was compared with the network would have drafted."""
    text = texts[one.request_id]
    places = torch.arange(one.num_tokens - one.count, one.num_tokens)
    return int((first_drafts(llm, text)[places - 2] == text[places]).sum())


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("method", METHODS)
def test_as_many_tokens_are_right_as_the_network_would_have_drafted(method: str):
    llm = engine_of(method)
    taught, texts = taught_by(llm, OFF, GREEDY)
    assert {one.step for one in taught} == {14, 21}
    assert [one.count for one in taught] == [MAX_TAUGHT] * PROMPTS + [5] * PROMPTS
    for one in taught:
        assert one.right == num_right(llm, texts, one)
    right, count = (sum(getattr(one, name) for one in taught) for name in ("right", "count"))
    assert 0 < right < count


@pytest.mark.parametrize("method", METHODS)
def test_a_step_behind_a_step_that_drafted_compares_nothing(method: str):
    """Nor does one behind a short pause, nor the first one behind a prompt."""
    llm = engine_of(method)
    planned: list[int] = []
    launch = llm.engine.runner.launch

    def watched(plan: StepPlan) -> PendingStep:
        planned.extend(work.max_taught for work in plan.works)
        return launch(plan)

    llm.engine.runner.launch = watched
    try:
        taught, _ = taught_by(llm, {4, 5, 6}, GREEDY)
    finally:
        llm.engine.runner.launch = launch
    assert len(planned) > 20
    assert not any(planned)
    assert not taught


@pytest.mark.parametrize("method", METHODS)
def test_drafts_that_are_drawn_teach_nothing(method: str):
    """Beside requests whose noise is shared, or that are greedy."""
    llm = engine_of(method)
    drawn = SamplingParams(temperature=0.7, ignore_eos=True)
    taught, texts = taught_by(llm, OFF, drawn, GREEDY, replace(drawn, seed=5))
    assert {one.request_id for one in taught} == {*list(texts)[1:]}


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(temperature=0.9, seed=3)])
def test_a_network_that_drafts_as_the_target_chooses_is_always_right(params: SamplingParams):
    """The target itself, without noise and with shared noise."""
    llm = engine_with("draft_model", assets.target_path())
    taught, _ = taught_by(llm, OFF, replace(params, ignore_eos=True, logit_bias={50: 3.0}))
    assert len(taught) == 2 * PROMPTS
    assert all(one.right == one.count for one in taught)


def test_best_tokens_as_drafts_teach_at_any_temperature():
    llm = engine_with("draft_model", assets.drafter_path(), draft_sample_method="greedy")
    drawn = SamplingParams(temperature=0.9, ignore_eos=True)
    taught, texts = taught_by(llm, OFF, drawn)
    assert len(taught) == 2 * PROMPTS
    assert all(one.right == num_right(llm, texts, one) for one in taught)
