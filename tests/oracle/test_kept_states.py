"""Whatever of a draft is accepted, caches hold what a prefill of the text would hold.

Steps verify random trees and chains and accept a random path of each, right or wrong; the logits
behind the newest token are then compared with those of models that read the text afresh.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from outdraft.core.plan import DraftChoice
from outdraft.core.request import Request
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.drafting.device.network_drafter import DraftNetwork, NetworkDrafter
from outdraft.engine.llm import LLM
from outdraft.kernels.data.drafts import DraftBatch, Verdict, row_start_B
from outdraft.kernels.decoder_ops import Choice
from outdraft.kernels.draft_ops import DraftStart, UnreadTexts
from outdraft.kv.cache import KVCache
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.config import ModelConfig
from outdraft.models.drafters.eagle import EagleNetwork
from outdraft.runner.model_runner import LaunchedStep
from tests.attention.causal import causal_metadata
from tests.oracle.engines import VOCAB_SIZE, NoisePolicy, engine, prompts_of, run
from tests.oracle.live_rules import RandomRules
from tests.reference.draft_trees import tree_depths

LENGTHS, NUM_TOKENS, CLOSE = (3, 21, 12), 16, 1e-10
EXACT = {"dtype": "float64", "kernels": "reference", "num_blocks": 300}


def cache_of(layers: ModelConfig, num_tokens: int) -> KVCache:
    return KVCache(layers.cache_shapes, 1, num_tokens, torch.float64, torch.device("cpu"))


def read_afresh(target: CausalLM, text: Tensor, taps: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Hidden states of the whole text, and the tapped ones."""
    batch = causal_metadata(0, len(text), torch.arange(len(text)), torch.zeros(1).int())
    layers = cache_of(target.config, len(text)).layers
    return target.forward_tapped(text, layers, batch, taps)


def known_tokens(request: Request, block_ids: Sequence[int], block_size: int) -> list[int] | None:
    """Places of the tokens that the drafter has read, or will read now; None: it reads keys that
    were made behind a gap of another text, which no pass makes afresh."""
    before, num_tokens = request.drafter_gap.before, request.num_tokens - 1
    if list(before) != list(block_ids[: len(before)]):
        return None
    first = len(before) * block_size
    return [*range(first), *range(first + request.drafter_gap.num_tokens, num_tokens)]


def drafter_afresh(
    target: CausalLM, network: DraftNetwork, text: Tensor, known: list[int]
) -> Tensor:
    """[V]: what the drafter expects behind the text."""
    eagle = network.network
    if isinstance(eagle, CausalLM):
        return eagle.logits(read_afresh(eagle, text, ())[0][-1:])[0]
    assert isinstance(eagle, EagleNetwork)
    features = eagle.features(*read_afresh(target, text, eagle.taps))[known]
    count = len(known)
    batch = causal_metadata(0, count, torch.arange(count), torch.zeros(1).int())
    layers = cache_of(eagle.config.layer, count).layers
    return eagle.logits(eagle(text[1:][known], features, layers, batch)[-1:])[0]


class RandomAcceptance:
    """Stands in for verification, and compares first."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self.runner, self.scheduler = llm.engine.runner, llm.engine.scheduler
        self.runner._verified = self.verify
        forward = self.runner._forward  # it must not choose before
        self.runner._forward = lambda plan, drafts, _: forward(plan, drafts, None)
        self.rng = np.random.default_rng(seed)
        self.num_branches = 0
        self.num_drafter_checks = self.num_gaps = 0
        proposer = self.runner.proposer
        if proposer is not None:
            self._watch(proposer.drafter)

    def verify(self, step: LaunchedStep) -> tuple[Choice, None]:
        model, drafts = self.runner.model, step.drafts
        assert drafts is not None
        logits_RV = model.logits(step.target.logit_states_RD)
        owners = {request.slot: request for request in self.scheduler.running}
        for work, root in zip(step.works, row_start_B(drafts).tolist(), strict=True):
            text = torch.from_numpy(owners[work.slot].token_ids.astype(np.int64))
            fresh = model.logits(read_afresh(model, text, ())[0][-1:])[0]
            torch.testing.assert_close(logits_RV[root], fresh, rtol=0, atol=CLOSE)
        is_finite_R = torch.ones(len(logits_RV), dtype=torch.bool)
        return Choice(self._verdict(drafts), is_finite_R), None

    def _verdict(self, drafts: DraftBatch) -> Verdict:
        """A random row of each draft is the last that is accepted; or none is."""
        ids_BN1 = torch.full((drafts.num_requests, drafts.width + 1), -1)
        rows_BN = torch.full((drafts.num_requests, drafts.width), -1)
        for b, number in enumerate(drafts.num_drafts_B.tolist()):
            parents = drafts.parents_BN[b, :number].tolist()
            row, path = int(self.rng.integers(0, number + 1)), []
            while row > 0:
                path.append(row - 1)
                row = parents[row - 1]
            path.reverse()
            depths = tree_depths(parents)
            self.num_branches += any(depths[row] != row + 1 for row in path)
            rows_BN[b, : len(path)] = torch.tensor(path, dtype=torch.int64)
            tokens = [*drafts.token_ids_BN[b, path].tolist(), int(self.rng.integers(0, VOCAB_SIZE))]
            ids_BN1[b, : len(tokens)] = torch.tensor(tokens)
        return Verdict(ids_BN1, (ids_BN1 >= 0).sum(1), rows_BN)

    def _watch(self, drafter: NetworkDrafter) -> None:
        start_of = drafter.start

        def checked(asks: Sequence[DraftModelAsk], unread: UnreadTexts) -> DraftStart:
            found = start_of(asks, unread)
            logits_BV = drafter.network.logits(found.states_BD)
            for ask, logits_V in zip(asks, logits_BV, strict=True):
                [request] = [r for r in self.scheduler.running if r.slot == ask.state_row]
                blocks = self.scheduler.table(request).ids
                known = known_tokens(request, blocks, self.runner.cache.block_size)
                if known is None:
                    continue
                text = unread.token_ids_SL[ask.state_row, : ask.num_tokens]
                fresh = drafter_afresh(self.runner.model, drafter.network, text, known)
                torch.testing.assert_close(logits_V, fresh, rtol=0, atol=CLOSE)
                self.num_drafter_checks += 1
                self.num_gaps += ask.num_missing > 0
            return found

        drafter.start = checked


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10_000), block_size=st.sampled_from([1, 4, 16]))
@pytest.mark.parametrize("family", ["llama-llama3-rope", "mistral-window", "qwen3-window"])
def test_after_random_trees_the_target_reads_on_as_after_a_prefill(
    family: str, seed: int, block_size: int
):
    llm = engine(family, "ngram", num_drafts=16, block_size=block_size, **EXACT)
    llm.engine.drafting = NoisePolicy(llm, {}, seed)
    acceptance = RandomAcceptance(llm, seed)
    run(llm, prompts_of(LENGTHS), sampled())
    assert acceptance.num_branches > 0


@pytest.mark.few(2)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10_000), block_size=st.sampled_from([2, 16]))
@pytest.mark.parametrize(
    "method", ["draft_model", "draft_model-tree", "eagle", "eagle-tree", "eagle3", "eagle3-tree"]
)
def test_the_drafter_too_and_whether_it_paused_or_not(method: str, seed: int, block_size: int):
    llm = engine("llama-llama3-rope", method, block_size=block_size, **EXACT)
    acceptance = run_with_pauses(llm, method, seed)
    assert acceptance.num_drafter_checks > 10


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10_000), block_size=st.sampled_from([1, 4]))
@pytest.mark.parametrize("method", ["eagle", "eagle-tree", "eagle3"])
def test_behind_a_gap_the_drafter_reads_on_as_if_the_text_had_none(
    method: str, seed: int, block_size: int
):
    llm = engine("llama-llama3-rope", method, block_size=block_size, **EXACT)
    policy, off = llm.engine.drafting, range(*np.random.default_rng(seed).integers((0, 4), (4, 9)))
    choose, steps = policy.choose, iter(range(1000))

    def chosen(*args: Any) -> dict[str, DraftChoice]:
        is_off = next(steps) in off
        policy.limits.network_may_draft = policy.limits.network_can_read = lambda *_: not is_off
        return {} if is_off else choose(*args)

    policy.choose = chosen
    acceptance = run_with_pauses(llm, method, seed)
    assume(acceptance.num_gaps > 3)  # else it shows little, and another case is drawn


def run_with_pauses(llm: LLM, method: str, seed: int) -> RandomAcceptance:
    """Nobody drafts in some of the steps."""
    policy, rng = llm.engine.drafting, np.random.default_rng(seed)
    choose = policy.choose
    policy.choose = lambda *args: choose(*args) if rng.random() < 0.7 else {}
    acceptance = RandomAcceptance(llm, seed)
    prompts = prompts_of(LENGTHS)
    run(llm, [*prompts, prompts[1], [*prompts[1][:17], 5, 6]], sampled())
    assert acceptance.num_branches > 0 or "tree" not in method
    return acceptance


@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 10_000), block_size=st.sampled_from([2, 16]))
@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_and_where_live_rules_end_its_chains(method: str, seed: int, block_size: int):
    llm = engine("llama-llama3-rope", method, block_size=block_size, **EXACT)
    rules, acceptance = RandomRules(llm, seed), RandomAcceptance(llm, seed)
    run(llm, prompts_of(LENGTHS), sampled())
    assert acceptance.num_drafter_checks > 10
    assert rules.num_short > 0


def sampled() -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True)
