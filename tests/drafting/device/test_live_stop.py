"""Chains that end where their live rule says."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from msgspec import structs

from outdraft.core.decision import LiveStop
from outdraft.core.draft import MAX_MARGIN, DraftSource, TreeShape
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.drafting.device.grower import grow
from outdraft.drafting.device.live_stop import margins_B, stop_rules
from outdraft.drafting.device.network_drafter import NetworkDrafter
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import Growth
from tests.drafting.small_networks import BLOCK_SIZE, KINDS, random_window, small_network
from tests.kernels.tables import kernels_for
from tests.models.eagle_checkpoints import VOCABULARY
from tests.reference.live_stop import live_lengths
from tests.reference.tabled_drafter import TabledLevels, TabledModel, sampling_of
from tests.sampling_batches import batch_of_params

DEPTH, CPU = 4, torch.device("cpu")
TIE = 1e-5  # survivals that are nearer to the price may fall on either side of it


def random_stop(rng: np.random.Generator, row_cap: int = 1 << 30) -> LiveStop:
    return LiveStop(
        tuple(rng.normal(0, 1, DEPTH).tolist()),
        tuple(rng.normal(1.5, 1, DEPTH).tolist()),
        float(rng.choice([0.0, 0.2, 0.5])),
        row_cap,
    )


def table_drafts(
    model: TabledModel,
    kinds: list[tuple[float, bool]],
    wanted: list[int],
    stops: list[LiveStop | None],
    num_host_rows: int = 0,
) -> list[DraftBatch]:
    """By the operation, and level by level; `kinds`: temperature, and whether noise is shared."""
    asks = [
        DraftModelAsk(0, 100, 0, number, (), stop=stop)
        for number, stop in zip(wanted, stops, strict=True)
    ]
    num_tokens_B = torch.full((len(kinds),), 100)
    temperatures, shares = zip(*kinds, strict=True)
    growth = Growth(
        kernels=kernels_for(torch.float32),
        shape=TreeShape.chain(max(wanted)),
        num_tokens_B=num_tokens_B,
        num_drafts_G=torch.tensor(wanted),
        fewest=min(wanted),
        sampling=sampling_of(temperatures, range(len(kinds)), model.vocab_size, shares),
        samples=True,
        stops=stop_rules(asks, num_host_rows, CPU),
    )
    levels = [TabledLevels(model, len(kinds)) for _ in range(2)]
    return [
        growth.kernels.grow(levels[0], growth, grow),
        grow(levels[1], growth),
    ]


def margin_behind(model: TabledModel, prefix: list[int], temperature: float) -> float:
    probs = model.probs(prefix)
    best, second = sorted(probs)[:-3:-1]
    if second == 0:
        return MAX_MARGIN
    return min(MAX_MARGIN, float(np.log(best / second)) / (temperature or 1.0))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.integers(1, 5))
def test_a_chain_is_the_beginning_of_the_whole_one_that_its_rule_allows(
    seed: int, has_cap: bool, num_requests: int
):
    """Requests with and without rules, of all kinds and lengths, under a cap on their rows."""
    rng = np.random.default_rng(seed)
    model = TabledModel(int(rng.integers(99)), 5, DEPTH, float(rng.choice([0.0, 0.6])))
    every = [(0.0, False), (1.0, False), (0.7, False), (1.0, True)]
    kinds = [every[one] for one in rng.integers(0, 4, num_requests)]
    wanted = rng.integers(1, DEPTH + 1, num_requests).tolist()
    num_host_rows = int(rng.integers(0, 3))
    row_cap = int(rng.integers(1, 3 * num_requests)) if has_cap else 1 << 30
    stops = [random_stop(rng, row_cap) if rng.random() < 0.8 else None for _ in kinds]
    whole = table_drafts(model, kinds, wanted, [None] * num_requests)[0].token_ids_BN.tolist()
    margins = [
        [margin_behind(model, ids[:level], kind[0]) for level in range(number)]
        for ids, kind, number in zip(whole, kinds, wanted, strict=True)
    ]
    lengths, looked, nearest = live_lengths(margins, wanted, stops, num_host_rows)
    assume(nearest > TIE)

    for made in table_drafts(model, kinds, wanted, stops, num_host_rows):
        assert made.num_drafts_B.tolist() == lengths
        for b, length in enumerate(lengths):
            ids = [token for token in made.token_ids_BN[b].tolist() if token >= 0]
            assert ids == whole[b][:length]
        if not any(stops):
            assert made.margins_BL is None
            continue
        assert made.margins_BL is not None
        assert made.margins_BL.dtype is torch.float32
        for row_L, want in zip(made.margins_BL.numpy(), looked, strict=True):
            np.testing.assert_allclose(row_L[: len(want)], want, rtol=1e-4, atol=1e-5)
            assert np.isnan(row_L[len(want) :]).all()


def test_margins_are_finite_whatever_the_logits_are():
    inf, nan = np.inf, np.nan
    rows = [[1, 3.5, 2], [2, 2, 0], [0, -inf, -inf], [99, 1, 2], [inf, 1, 2], [inf, inf, 1]]
    rows += [[nan, 1, 3], [nan, nan, 1], [-inf, -inf, -inf]]
    got = margins_B(torch.tensor(rows))
    most = MAX_MARGIN
    assert got.tolist() == [1.5, 0.0, most, most, most, 0.0, 2.0, most, 0.0]
    assert margins_B(torch.tensor([[4.0]])).tolist() == [most]


@pytest.mark.parametrize("sampled", [0, 1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_have_ended_are_in_no_later_pass(kind: str, sampled: int, tmp_path):
    """The caches behind their texts hold the drafts that were read for their last look, and no
    more; the others' drafts are not disturbed."""
    wanted, texts, num_blocks = [4, 4, 2, 4], (9, 6, 3, 11), 5
    network, cache = small_network(kind, num_blocks * len(texts), tmp_path)
    whole, stopped = [], LiveStop((0.0,) * 4, (0.0,) * 4, 0.2)  # survivals 1/2, 1/4, 1/8
    texts_SL = torch.randint(1, VOCABULARY, (4, 12), generator=torch.Generator().manual_seed(3))
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)]
    batch = [params[at < sampled] for at in range(4)]
    for stops in ([None] * 4, [None, stopped, stopped, structs.replace(stopped, price=0.6)]):
        for layer in cache.layers:
            layer.k_PSGC.fill_(0)
            layer.v_PSGE.fill_(0)
        asks = [
            DraftModelAsk(b, length, 0, number, range(b * num_blocks, (b + 1) * num_blocks), (), s)
            for b, (length, number, s) in enumerate(zip(texts, wanted, stops, strict=True))
        ]
        window = random_window(network, len(texts), 12)
        drafter = NetworkDrafter(network, cache, 100, DraftSource.EAGLE3, window)
        proposer = DeviceProposer(kernels_for(torch.float32), drafter, None, samples=True)
        sampling = batch_of_params(batch, seeds=range(4), vocab_size=VOCABULARY, device="cpu")
        with torch.inference_mode():
            whole.append(proposer.propose(asks, texts_SL, sampling))
    everything, made = whole
    assert made.num_drafts_B.tolist() == [4, 2, 2, 0]
    assert made.margins_BL is not None
    assert (~made.margins_BL.isnan()).sum(1).tolist() == [0, 3, 2, 1]
    for b, (length, count) in enumerate(zip(texts, made.num_drafts_B.tolist(), strict=True)):
        assert torch.equal(made.token_ids_BN[b, :count], everything.token_ids_BN[b, :count])
        assert (made.token_ids_BN[b, count:] == -1).all()
        places = torch.arange(num_blocks * BLOCK_SIZE) + b * num_blocks * BLOCK_SIZE
        is_written = [
            bool((layer.k_PSGC.flatten(0, 1)[places].flatten(1) != 0).any(1)[place])
            for layer in cache.layers[:1]
            for place in range(len(places))
        ]
        num_read = length - network.token_shift + (3, 2, 1, 0)[b]
        assert is_written == [place < num_read for place in range(len(places))]


def test_a_price_that_no_level_reaches_leaves_no_drafts():
    model = TabledModel(1, 5, DEPTH)
    stop = LiveStop((0.0,) * DEPTH, (0.0,) * DEPTH, 0.9)
    for made in table_drafts(model, [(1.0, False), (0.0, False)], [4, 3], [stop, stop]):
        assert made.num_drafts_B.tolist() == [0, 0]
        assert (made.token_ids_BN == -1).all()
