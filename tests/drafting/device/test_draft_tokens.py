"""Drafters that choose among a part of a large vocabulary."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outdraft import LLM, SamplingParams
from outdraft.core.draft import DraftSource, TreeShape
from outdraft.distributed.group import ALL_HERE, ALONE, RequestShares
from outdraft.distributed.vocabulary import VocabularyShard
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.drafting.device.network_drafter import DraftNetwork, NetworkDrafter
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kv.cache import KVCache
from outdraft.models.decoder import layers
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.loader import load_model
from tests.drafting.device.test_network_drafter import SingleLevels
from tests.kernels.tables import cpu_kernels, kernels_for
from tests.models.checkpoints import llama, randomised, save
from tests.sampling_batches import batch_of_params

TILE, VOCABULARY = 32, 403  # 12 tiles, and one of 19 tokens
NUM_TOKENS, NUM_DRAFTS, BLOCKS_EACH = 9, 4, 4


class ChosenTokens:
    """The readable twin of csrc/draft_tokens.h."""

    def __init__(self, num_first: int) -> None:
        self.tiles = list(range(num_first // TILE))
        self._num_first, self._num_learned = len(self.tiles), 0

    def learn(self, token_ids: Sequence[int]) -> None:
        room = max(1, self._num_first // 2)
        for tile in (id_ // TILE for id_ in token_ids):
            if tile >= VOCABULARY // TILE or tile in self.tiles:
                continue
            place = self._num_first + self._num_learned % room
            self.tiles[place : place + 1] = [tile]
            self._num_learned += 1

    def masked(self, logits_RV: Tensor) -> Tensor:
        is_chosen_V = torch.zeros(VOCABULARY, dtype=torch.bool)
        for tile in self.tiles:
            is_chosen_V[TILE * tile : TILE * (tile + 1)] = True
        return logits_RV.masked_fill(~is_chosen_V, -torch.inf)


class MaskedLevels(SingleLevels):
    """A network that drafts level by level, among chosen tokens."""

    def __init__(self, network: DraftNetwork, chosen: ChosenTokens) -> None:
        super().__init__(network)
        all_logits = self.logits

        def logits(states_RD: Tensor, shares: RequestShares = ALL_HERE) -> Tensor:
            return chosen.masked(all_logits(states_RD, shares))

        self.logits = logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(randomised(llama(vocab_size=VOCABULARY)), tmp_path_factory.mktemp("drafter"))


def cache_of(model: CausalLM) -> KVCache:
    return KVCache(
        model.config.cache_shapes, 2 * BLOCKS_EACH, 4, torch.float32, torch.device("cpu")
    )


def propose(
    network: DraftNetwork, cache: KVCache, texts_SL: Tensor, params: SamplingParams
) -> DraftBatch:
    asks = [
        DraftModelAsk(i, NUM_TOKENS, 0, NUM_DRAFTS, range(BLOCKS_EACH * i, BLOCKS_EACH * (i + 1)))
        for i in range(len(texts_SL))
    ]
    sampling = batch_of_params(
        [params] * len(asks), seeds=[3, 4], vocab_size=VOCABULARY, device="cpu"
    )
    drafter = NetworkDrafter(network, cache, 100, DraftSource.MODEL)
    shape = TreeShape((1,) * NUM_DRAFTS)
    proposer = DeviceProposer(kernels_for(torch.float32), drafter, shape, samples=True)
    with torch.inference_mode():
        return proposer.propose(asks, texts_SL, sampling)


@pytest.mark.parametrize("num_first", [32, 64, 128])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_are_those_of_the_first_tokens_and_of_texts(
    num_first: int, temperature: float, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layers, "FIRST_DRAFTS", num_first)
    model = load_model(folder, torch.float32, "cpu", cpu_kernels(), drafts=True)
    chosen, mine = ChosenTokens(num_first), DraftNetwork(model)
    twin = MaskedLevels(mine, chosen)
    params = SamplingParams(temperature=temperature)
    drafted = set[int]()
    for seed in range(6):
        generator = torch.Generator().manual_seed(seed)
        texts_SL = torch.randint(0, VOCABULARY, (2, NUM_TOKENS), generator=generator)
        chosen.learn(texts_SL.flatten().tolist())
        got = propose(mine, cache_of(model), texts_SL, params)
        wanted = propose(twin, cache_of(model), texts_SL, params)
        assert torch.equal(got.token_ids_BN, wanted.token_ids_BN)
        if temperature:
            assert got.probs_BNV is not None
            assert wanted.probs_BNV is not None
            torch.testing.assert_close(got.probs_BNV, wanted.probs_BNV, rtol=1e-4, atol=1e-6)
        drafted |= {*got.token_ids_BN.flatten().tolist()}
    assert max(drafted) >= num_first, "no token of a text was drafted"


def test_a_vocabulary_is_cut_where_it_is_three_times_as_large():
    first = layers.FIRST_DRAFTS
    assert layers.first_drafts(VocabularyShard(ALONE, 3 * first)) == first
    assert layers.first_drafts(VocabularyShard(ALONE, 3 * first - 1)) == 0


def test_targets_say_what_they_would_say_alone(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(layers, "FIRST_DRAFTS", 64)
    prompts = [[5, 390, 7, 200, 7], [401, 12, 13]]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    drafter = {"model": str(folder), "num_speculative_tokens": 3, "control": "fixed"}
    answers: list[list[list[int]]] = []
    for speculation in (None, drafter):
        llm = LLM(str(folder), speculative_config=speculation, cost_table="roofline")
        answers.append([out.outputs[0].token_ids for out in llm.generate(prompts, params)])
    assert answers[0] == answers[1]
    assert max(answers[0][0]) >= 64
