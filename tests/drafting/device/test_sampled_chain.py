"""A drawn chain in one compiled call is the chain that is drawn pass by pass, bit for bit."""

import pytest
import torch

from outdraft.core.draft import DraftSource
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device import network_proposer
from outdraft.drafting.device.draft_network import DraftNetwork
from outdraft.drafting.device.model_drafts import DraftModelAsk, ModelDrafts
from outdraft.drafting.device.network_proposer import NetworkProposer
from outdraft.kv.cache import KVCache
from outdraft.sampling.batch import SamplingBatch
from tests.drafting.small_networks import KINDS as NETWORKS
from tests.drafting.small_networks import small_network
from tests.models.eagle_checkpoints import VOCABULARY

NUM_BLOCKS = 24
LENGTHS, WANTED = (9, 5, 14), (4, 2, 3)
KINDS = {
    "plain": [SamplingParams(temperature=1.0)] * 3,
    "cut": [
        SamplingParams(temperature=0.7, top_k=9),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=0.9, min_p=0.1, top_k=20, top_p=0.9),
    ],
    "some greedy": [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5),
    ],
    "all seeded": [SamplingParams(temperature=1.0, seed=i) for i in (5, 6, 7)],
    "some seeded": [
        SamplingParams(temperature=1.0, seed=5),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.0, seed=7),
    ],
    "allowed and biased": [
        SamplingParams(temperature=1.0, allowed_token_ids=list(range(0, 60, 2))),
        SamplingParams(temperature=1.0, logit_bias={3: 4.0}),
        SamplingParams(temperature=1.0),
    ],
}


@pytest.fixture(scope="module", params=NETWORKS)
def network(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[DraftNetwork, KVCache]:
    return small_network(request.param, NUM_BLOCKS, tmp_path_factory.mktemp("checkpoint"))


def drafts(network: tuple[DraftNetwork, KVCache], kind: str, num_requests: int) -> ModelDrafts:
    drafting, cache = network
    generator = torch.Generator().manual_seed(2)
    texts_SL = torch.randint(0, VOCABULARY, (3, 20), generator=generator)
    asks = [
        DraftModelAsk(i, LENGTHS[i], 0, WANTED[i], tuple(range(6 * i, 6 * i + 6)))
        for i in range(num_requests)
    ]
    sampling = SamplingBatch.from_requests(
        KINDS[kind][:num_requests],
        seeds=[5, 6, 7][:num_requests],
        vocab_size=VOCABULARY,
        device="cpu",
    )
    proposer = NetworkProposer(drafting, cache, 100, DraftSource.EAGLE3, samples=True)
    with torch.inference_mode():
        return proposer.propose(asks, texts_SL, sampling)


@pytest.mark.parametrize("num_requests", [1, 3])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_it_is_the_chain_of_single_passes(
    network: tuple[DraftNetwork, KVCache],
    kind: str,
    num_requests: int,
    monkeypatch: pytest.MonkeyPatch,
):
    calls: list[object] = []
    draw = network_proposer.draw_chain_cpu
    monkeypatch.setattr(
        network_proposer, "draw_chain_cpu", lambda *args: calls.append(args) or draw(*args)
    )
    mine = drafts(network, kind, num_requests)
    is_compiled = kind != "allowed and biased" and (kind, num_requests) != ("some greedy", 1)
    assert len(calls) == is_compiled

    monkeypatch.setattr(type(network[0]), "compiled_chain", lambda *_: None)
    other = drafts(network, kind, num_requests)

    assert torch.equal(mine.token_ids_BK, other.token_ids_BK)
    assert mine.all_sampled == other.all_sampled
    if other.probs_BKV is None:
        assert mine.probs_BKV is None
        return
    assert mine.probs_BKV is not None
    assert torch.equal(mine.probs_BKV, other.probs_BKV)
    assert mine.probs_BKV.is_contiguous()
