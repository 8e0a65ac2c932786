"""Drafts of networks that read their own drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from torch import Tensor

from outdraft.core.decision import LiveStop
from outdraft.core.draft import DraftSource, TreeShape
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.drafting.device.network_drafter import DraftNetwork, NetworkDrafter, NetworkLevels
from outdraft.drafting.device.proposer import FEW_UNREAD, DeviceProposer
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import Capturable, Frontier, Growth, TreeLevels
from outdraft.kv.cache import KVCache
from tests.drafting.small_networks import BLOCK_SIZE, KINDS, random_window, small_network
from tests.kernels.tables import kernels_for
from tests.models.eagle_checkpoints import VOCABULARY
from tests.sampling_batches import batch_of_params

Network = tuple[DraftNetwork, KVCache]

MOST_TOKENS, MOST_ROWS, MOST_REQUESTS = 17, 25, 3
BLOCKS_EACH = -(-(MOST_TOKENS + MOST_ROWS) // BLOCK_SIZE)
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
SEEDED = SamplingParams(temperature=1.0, seed=3)  # drafted with the target's noise
TEXTS_SL = torch.randint(
    0, VOCABULARY, (MOST_REQUESTS, MOST_TOKENS), generator=torch.Generator().manual_seed(1)
)


@dataclass(frozen=True)
class Case:
    """A batch: `num_tokens` and `num_rows` of each request's text and tree."""

    shape: TreeShape
    params: Sequence[SamplingParams]
    num_tokens: Sequence[int]
    num_rows: Sequence[int]
    seed: int = 0

    def asks(self) -> list[DraftModelAsk]:
        generator = torch.Generator().manual_seed(self.seed)
        blocks = torch.randperm(MOST_REQUESTS * BLOCKS_EACH, generator=generator).tolist()
        levels = () if self.shape.is_chain else self.shape.levels
        asks: list[DraftModelAsk] = []
        for i, (length, rows) in enumerate(zip(self.num_tokens, self.num_rows, strict=True)):
            own = blocks[BLOCKS_EACH * i : BLOCKS_EACH * (i + 1)]
            asks.append(DraftModelAsk(i, length, 0, rows, own, levels=levels))
        return asks


@pytest.fixture(scope="module", params=KINDS)
def network(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Network:
    folder = tmp_path_factory.mktemp("checkpoint")
    return small_network(request.param, MOST_REQUESTS * BLOCKS_EACH, folder)


def drafter_of(network: Network) -> NetworkDrafter:
    drafting, cache = network
    for layer in cache.layers:
        layer.k_PSGC.fill_(0)
        layer.v_PSGE.fill_(0)
    window = random_window(drafting, MOST_REQUESTS, MOST_TOKENS)
    return NetworkDrafter(drafting, cache, 100, DraftSource.EAGLE3, window)


def propose(
    network: Network,
    case: Case,
    chosen: slice = slice(None),
    *,
    samples: bool = True,
    grow: Callable[..., DraftBatch] | None = None,
    rounded: Callable[[int], int] = int,
) -> DraftBatch:
    """`grow`: instead of the table's. `rounded`: numbers of requests."""
    sampling = batch_of_params(
        case.params[chosen],
        seeds=[case.seed + i for i in range(len(case.params))][chosen],
        vocab_size=VOCABULARY,
        device="cpu",
    )
    kernels = kernels_for(torch.float32)
    kernels = replace(kernels, grow=grow or kernels.grow, padded_draft_batch=rounded)
    proposer = DeviceProposer(kernels, drafter_of(network), case.shape, samples=samples)
    with torch.inference_mode():
        return proposer.propose(case.asks()[chosen], TEXTS_SL, sampling)


class SingleLevels:
    """A network without a whole draft."""

    fused = None

    def __init__(self, network: DraftNetwork) -> None:
        self.token_shift, self.taps, self.kernels = (
            network.token_shift,
            network.taps,
            network.kernels,
        )
        self.reads_hidden = network.reads_hidden
        self.feature_size = network.feature_size
        self.features, self.read, self.logits = network.features, network.read, network.logits


def probs_behind(network: Network, ask: DraftModelAsk, path: Sequence[int]) -> Tensor:
    """[V]: what follows these drafts, read one by one."""
    with torch.inference_mode():
        drafter, asks = drafter_of(network), [structs.replace(ask, num_drafts=len(path) + 1)]
        start = drafter.start(asks, drafter.unread(asks, TEXTS_SL))
        levels = NetworkLevels(network[0], start, torch.tensor([len(path) + 1]))
        logits_V = levels.first_logits()[0]
        for place, token in enumerate(path):
            ids_11, bits_11 = torch.tensor([[token]]), torch.tensor([[(2 << place) - 1]])
            frontier = Frontier(ids_11, torch.zeros_like(ids_11), bits_11, place + 1, place)
            logits_V = levels.next_logits(frontier)[0, 0]
    return logits_V.softmax(0)


class MovedGrowth:
    """Over copies of the levels' tensors, as a graph reads them."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(
        self,
        levels: TreeLevels,
        growth: Growth,
        by_levels: Callable[[TreeLevels, Growth], DraftBatch],
    ) -> DraftBatch:
        self.num_calls += 1
        assert isinstance(levels, Capturable)
        assert levels.first_keys_PSGC.dim() == 4
        tensors, common = levels.static_inputs()
        copies = tuple(None if one is None else one.clone() for one in tensors)
        for tensor in tensors[:-1]:  # the numbers of drafts are a part of the growth, too
            if tensor is not None:
                tensor.fill_(1)  # whoever still reads it finds nonsense
        return by_levels(levels.rebind(copies, common), growth)


shapes = st.builds(
    lambda rows: TreeShape(tuple(rows)), st.lists(st.integers(1, 5), min_size=1, max_size=5)
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    params = draw(
        st.lists(st.sampled_from([GREEDY, DRAWN, SEEDED]), min_size=1, max_size=MOST_REQUESTS)
    )
    shape = draw(shapes)
    return Case(
        shape=shape,
        params=params,
        num_tokens=[draw(st.integers(2, MOST_TOKENS)) for _ in params],
        num_rows=[
            draw(st.one_of(st.just(shape.num_rows), st.integers(1, shape.num_rows))) for _ in params
        ],
        seed=draw(st.integers(0, 1000)),
    )


# With these a level may need tokens without mass, and the likeliest of them are all alike.
CUT = [
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.1, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, allowed_token_ids=list(range(0, 60, 2))),
    SamplingParams(temperature=0.0, allowed_token_ids=list(range(5, 35)), logit_bias={6: 9.0}),
]
OTHERS = [
    *CUT,
    SamplingParams(temperature=0.7, top_k=9),
    SamplingParams(temperature=1.0, logit_bias={3: 4.0, 7: -1.0}, seed=4),
    SamplingParams(temperature=0.0, allowed_token_ids=list(range(2, VOCABULARY))),
    SamplingParams(temperature=1.0, presence_penalty=1.0),
]


@settings(max_examples=20, deadline=None)
@given(case=cases(), others=st.lists(st.sampled_from(OTHERS), max_size=2), samples=st.booleans())
def test_a_whole_draft_is_that_of_single_levels(
    network: Network, case: Case, others: list[SamplingParams], samples: bool
):
    others = [one for one in others if one not in CUT or (samples and one.temperature > 0)]
    case = replace(case, params=[*others, *case.params][: len(case.params)])
    mine = propose(network, case, samples=samples)
    moved = MovedGrowth()
    theirs = propose((SingleLevels(network[0]), network[1]), case, samples=samples, grow=moved)
    assert moved.num_calls == 1
    assert torch.equal(mine.token_ids_BN, theirs.token_ids_BN)
    for b, rows in enumerate(case.num_rows):
        assert torch.equal(mine.parents_BN[b, :rows], theirs.parents_BN[b, :rows])
    assert torch.equal(mine.num_drafts_B, theirs.num_drafts_B)
    assert (mine.is_chain, mine.all_sampled) == (theirs.is_chain, theirs.all_sampled)
    if theirs.is_sampled_BN is None or theirs.probs_BNV is None:
        assert mine.is_sampled_BN is mine.probs_BNV is None
        return
    assert mine.is_sampled_BN is not None
    assert mine.probs_BNV is not None
    assert torch.equal(mine.is_sampled_BN, theirs.is_sampled_BN)
    is_drawn_BK = mine.is_sampled_BN  # the other rows' probabilities are anything
    torch.testing.assert_close(
        mine.probs_BNV[is_drawn_BK], theirs.probs_BNV[is_drawn_BK], rtol=1e-4, atol=1e-6
    )


@settings(max_examples=12, deadline=None)
@given(case=cases(), samples=st.booleans(), more=st.integers(1, 4))
def test_requests_that_round_up_a_batch_change_nothing(
    network: Network, case: Case, samples: bool, more: int
):
    grown = list[int]()

    def growing(
        levels: TreeLevels,
        growth: Growth,
        by_levels: Callable[[TreeLevels, Growth], DraftBatch],
    ) -> DraftBatch:
        grown.append(growth.sampling.num_requests)
        return by_levels(levels, growth)

    small = SingleLevels(network[0]), network[1]
    want = propose(small, case, samples=samples)
    got = propose(small, case, samples=samples, grow=growing, rounded=lambda number: number + more)
    number = len(case.params)
    has_short = any(length <= FEW_UNREAD for length in case.num_tokens)
    assert grown == [number + more if has_short else number]
    assert torch.equal(got.token_ids_BN, want.token_ids_BN)
    assert torch.equal(got.num_drafts_B, want.num_drafts_B)
    for mine_K, theirs_K, rows in zip(got.parents_BN, want.parents_BN, case.num_rows, strict=True):
        assert torch.equal(mine_K[:rows], theirs_K[:rows])
    if want.is_sampled_BN is not None:
        assert torch.equal(got.is_sampled_BN, want.is_sampled_BN)
        mine, theirs = (one.probs_BNV[want.is_sampled_BN] for one in (got, want))
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("stop", [LiveStop((1.0,), (0.0,), 0.5), LiveStop((1.0,), (0.0,), 0, 3)])
def test_no_request_rounds_up_a_batch_whose_rules_count_rows(network: Network, stop: LiveStop):
    kernels = replace(kernels_for(torch.float32), padded_draft_batch=lambda _: 4)
    proposer = DeviceProposer(kernels, drafter_of(network), None, samples=True)
    case = Case(TreeShape.chain(1), [GREEDY], [5], [1])
    sampling = batch_of_params(case.params, seeds=[0], vocab_size=VOCABULARY, device="cpu")
    asks = [structs.replace(case.asks()[0], stop=stop)]
    with (
        torch.inference_mode(),
        patch.object(proposer.drafter, "draft", wraps=proposer.drafter.draft) as draft,
    ):
        proposer.propose(asks, TEXTS_SL, sampling)
        assert draft.call_args[0][0] == asks
        proposer.propose([structs.replace(asks[0], stop=None)], TEXTS_SL, sampling)
        assert len(draft.call_args[0][0]) == 4


@settings(max_examples=6, deadline=None)
@given(case=cases())
def test_drawn_rows_come_from_what_follows_their_path(network: Network, case: Case):
    drafts = propose(network, case)
    for b, ask in enumerate(case.asks()):
        ids = drafts.token_ids_BN[b, : ask.num_drafts].tolist()
        parents = drafts.parents_BN[b, : ask.num_drafts].tolist()
        if case.params[b] is not DRAWN:
            assert drafts.is_sampled_BN is None or not drafts.is_sampled_BN[b].any()
            continue
        paths: list[list[int]] = [[]]
        before: dict[int, list[int]] = {}
        assert drafts.probs_BNV is not None
        for row, (token, parent) in enumerate(zip(ids, parents, strict=True)):
            left_V = probs_behind(network, ask, paths[parent])
            left_V[before.setdefault(parent, [])] = 0
            want_V = left_V / left_V.sum()
            torch.testing.assert_close(drafts.probs_BNV[b, row], want_V, rtol=1e-3, atol=1e-5)
            before[parent].append(token)
            paths.append([*paths[parent], token])


@settings(max_examples=6, deadline=None)
@given(case=cases())
def test_greedy_chains_hold_the_best_token_behind_each(network: Network, case: Case):
    case = replace(case, shape=TreeShape.chain(5), num_rows=[5, 2, 4][: len(case.params)])
    drafts = propose(network, case, samples=False)
    assert drafts.is_chain
    assert drafts.probs_BNV is drafts.is_sampled_BN is None
    for b, ask in enumerate(case.asks()):
        ids = drafts.token_ids_BN[b].tolist()
        assert set(ids[ask.num_drafts :]) <= {-1}
        for row, token in enumerate(ids[: ask.num_drafts]):
            probs_V = probs_behind(network, ask, ids[:row])
            assert probs_V[token] >= probs_V.max() * (1 - 1e-4)


@settings(max_examples=6, deadline=None)
@given(case=cases())
def test_the_drafts_of_a_request_do_not_depend_on_the_rest_of_the_batch(
    network: Network, case: Case
):
    if not case.shape.is_chain:  # the deepest tree that is wanted decides how many levels grow
        case = replace(case, num_rows=[case.shape.num_rows] * len(case.params))
    together = propose(network, case)
    for b, rows in enumerate(case.num_rows):
        alone = propose(network, case, slice(b, b + 1))
        assert torch.equal(together.token_ids_BN[b, :rows], alone.token_ids_BN[0, :rows])
        assert torch.equal(together.parents_BN[b, :rows], alone.parents_BN[0, :rows])


def test_the_texts_have_a_say_in_them(network: Network):
    case = Case(TreeShape((3, 3)), [DRAWN] * 2, (9, 5), (6, 6), seed=1)
    mine = propose(network, case)
    for changed in (replace(case, seed=2), replace(case, num_tokens=(8, 6))):
        other = propose(network, changed)
        assert not torch.equal(mine.token_ids_BN, other.token_ids_BN)


def test_a_vocabulary_that_cannot_fill_a_level_is_refused(network: Network):
    case = Case(TreeShape((VOCABULARY + 1,)), [DRAWN], (4,), (3,))
    with pytest.raises(ValueError, match="61 tokens cannot fill 62 rows"):
        propose(network, case)
