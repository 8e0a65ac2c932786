"""Drawn trees in one compiled call are the trees that are drawn level by level, bit for bit."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outdraft.core.draft import DraftSource
from outdraft.core.sampling import SamplingParams
from outdraft.core.tree_shape import TreeShape
from outdraft.core.tree_template import TreeTemplate
from outdraft.drafting.device import network_proposer
from outdraft.drafting.device.draft_network import DraftNetwork
from outdraft.drafting.device.model_drafts import DraftModelAsk, ModelDrafts
from outdraft.drafting.device.network_proposer import NetworkLevels, NetworkProposer
from outdraft.drafting.device.tree_proposer import TreeProposer
from outdraft.kv.cache import KVCache
from outdraft.sampling.batch import SamplingBatch
from tests.drafting.small_networks import BLOCK_SIZE, KINDS, small_network
from tests.models.eagle_checkpoints import VOCABULARY

Network = tuple[DraftNetwork, KVCache]

TEMPLATES = [
    TreeTemplate.parse("[(0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0), (2, 0, 0)]"),
    TreeTemplate.parse("[(0,), (1,), (2,), (3,), (0, 0), (1, 0), (1, 1), (3, 0)]"),
]
MOST_TOKENS, MOST_ROWS, MOST_REQUESTS = 17, 25, 3
BLOCKS_EACH = -(-(MOST_TOKENS + MOST_ROWS) // BLOCK_SIZE)
DRAWN = SamplingParams(temperature=1.0)
SEEDED = SamplingParams(temperature=1.0, seed=3)  # drafted with the target's noise


@dataclass(frozen=True)
class Case:
    """A batch: `num_tokens` and `num_rows` of each request's text and tree."""

    shape: TreeShape | TreeTemplate
    params: Sequence[SamplingParams]
    num_tokens: Sequence[int]
    num_rows: Sequence[int]
    seed: int = 0
    samples: bool = True


@pytest.fixture(scope="module", params=KINDS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder = tmp_path_factory.mktemp("checkpoint")
    return small_network(request.param, MOST_REQUESTS * BLOCKS_EACH, folder)


def propose(network: Network, case: Case) -> tuple[ModelDrafts, list[Tensor]]:
    """The drafts, and what the cache holds behind them."""
    drafting, cache = network
    for layer in cache.layers:
        layer.k_PSGC.fill_(0)
        layer.v_PSGC.fill_(0)
    generator = torch.Generator().manual_seed(case.seed)
    texts_SL = torch.randint(0, VOCABULARY, (MOST_REQUESTS, MOST_TOKENS + 1), generator=generator)
    blocks = torch.randperm(MOST_REQUESTS * BLOCKS_EACH, generator=generator).tolist()
    asks = [
        DraftModelAsk(i, length, 0, rows, blocks[BLOCKS_EACH * i : BLOCKS_EACH * (i + 1)])
        for i, (length, rows) in enumerate(zip(case.num_tokens, case.num_rows, strict=True))
    ]
    sampling = SamplingBatch.from_requests(
        case.params,
        seeds=[case.seed + i for i in range(len(asks))],
        vocab_size=VOCABULARY,
        device="cpu",
    )
    chains = NetworkProposer(drafting, cache, 100, DraftSource.EAGLE3, samples=case.samples)
    trees = TreeProposer(chains, case.shape, samples=case.samples)
    with torch.inference_mode():
        drafts = trees.propose(asks, texts_SL, sampling)
    return drafts, [x for layer in cache.layers for x in (layer.k_PSGC, layer.v_PSGC)]


def propose_both(network: Network, case: Case, is_compiled: bool) -> tuple[ModelDrafts, ...]:
    """What the proposer drafts, after a look whether it did so by one call, and what it drafts
    level by level; the caches are compared here."""
    calls: list[object] = []
    draw: Callable[..., ModelDrafts] = network_proposer.draw_trees_cpu

    def counted(*args: Any) -> ModelDrafts:
        calls.append(args)
        return draw(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network_proposer, "draw_trees_cpu", counted)
        mine, cached = propose(network, case)
        cached = [x.clone() for x in cached]
        assert len(calls) == is_compiled
        patch.setattr(NetworkLevels, "draw_trees", lambda *_: None)
        other, others_cached = propose(network, case)
        assert len(calls) == is_compiled
    assert all(map(torch.equal, cached, others_cached))
    return mine, other


def assert_same(mine: ModelDrafts, other: ModelDrafts) -> None:
    assert torch.equal(mine.token_ids_BK, other.token_ids_BK)
    assert mine.parents_BK is not None
    assert other.parents_BK is not None
    assert torch.equal(mine.parents_BK, other.parents_BK)
    assert mine.all_sampled == other.all_sampled
    if other.is_sampled_BK is None or other.probs_BKV is None:
        assert mine.is_sampled_BK is mine.probs_BKV is None
        return
    assert mine.is_sampled_BK is not None
    assert mine.probs_BKV is not None
    assert torch.equal(mine.is_sampled_BK, other.is_sampled_BK)
    assert mine.probs_BKV.shape == other.probs_BKV.shape
    assert mine.probs_BKV.is_contiguous()
    # The other rows' probabilities are anything.
    is_drawn_BK = mine.is_sampled_BK
    assert torch.equal(mine.probs_BKV[is_drawn_BK], other.probs_BKV[is_drawn_BK])


shapes = st.one_of(
    st.lists(st.integers(1, 5), min_size=1, max_size=5).map(lambda rows: TreeShape(tuple(rows))),
    st.sampled_from(TEMPLATES),
)
parameters = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    top_k=st.sampled_from([0, 0, 3, 9]),
    top_p=st.sampled_from([1.0, 1.0, 0.8]),
    min_p=st.sampled_from([0.0, 0.0, 0.1]),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    shape, params = draw(shapes), draw(st.lists(parameters, min_size=1, max_size=MOST_REQUESTS))
    return Case(
        shape=shape,
        params=params,
        num_tokens=[draw(st.integers(2, MOST_TOKENS)) for _ in params],
        num_rows=[
            draw(st.one_of(st.just(shape.num_rows), st.integers(1, shape.num_rows))) for _ in params
        ],
        seed=draw(st.integers(0, 1000)),
    )


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_they_are_the_trees_of_single_levels(network: Network, case: Case):
    assert_same(*propose_both(network, case, is_compiled=True))


def test_the_texts_have_a_say_in_them(network: Network):
    case = Case(TreeShape((3, 3)), [DRAWN] * 2, (9, 5), (6, 6), seed=1)
    mine, _ = propose(network, case)
    for changed in (replace(case, seed=2), replace(case, num_tokens=(8, 6))):
        other, _ = propose(network, changed)
        assert not torch.equal(mine.token_ids_BK, other.token_ids_BK)


WIDE = TreeShape((22, 2))  # three of its first levels are more rows than a compiled pass has


@pytest.mark.parametrize(
    ("changes", "is_compiled"),
    [
        ({}, True),
        ({"shape": WIDE}, False),
        ({"shape": WIDE, "params": [DRAWN] * 2}, True),
        ({"params": [DRAWN, SamplingParams(temperature=0.0), DRAWN]}, False),
        ({"params": [SamplingParams(temperature=0.0)]}, False),
        ({"params": [DRAWN, SamplingParams(temperature=1.0, logit_bias={3: 4.0})]}, False),
        ({"params": [SamplingParams(temperature=1.0, allowed_token_ids=[1, 2, 5])]}, False),
        ({"params": [SamplingParams(temperature=1.0, presence_penalty=1.0)]}, True),
        ({"params": [SEEDED]}, False),
        ({"params": [DRAWN, SEEDED, DRAWN]}, False),
        ({"samples": False}, False),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [TreeShape((4, 2, 3)), TEMPLATES[0]], ids=["levels", "template"])
def test_other_batches_go_level_by_level(
    network: Network,
    shape: TreeShape | TreeTemplate,
    changes: dict[str, Any],
    is_compiled: bool,
):
    case = replace(Case(shape, [DRAWN] * 3, (), ()), **changes)
    num_requests = len(case.params)
    rows = [case.shape.num_rows] * num_requests
    case = replace(case, num_tokens=(9, 5, 14)[:num_requests], num_rows=rows)
    assert_same(*propose_both(network, case, is_compiled))


def test_networks_without_compiled_passes_go_level_by_level(
    network: Network, monkeypatch: pytest.MonkeyPatch
):
    case = Case(TreeShape((3, 2)), [DRAWN], (9,), (5,))
    mine, _ = propose(network, case)
    monkeypatch.setattr(type(network[0]), "compiled_chain", lambda *_: None)
    assert_same(*propose_both(network, case, is_compiled=False))
    assert_same(mine, propose(network, case)[0])


def test_a_vocabulary_that_cannot_fill_a_level_is_refused(network: Network):
    case = Case(TreeShape((VOCABULARY + 1,)), [DRAWN], (4,), (3,))
    with pytest.raises(ValueError, match="61 tokens cannot fill 62 rows"):
        propose(network, case)
