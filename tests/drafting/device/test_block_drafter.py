"""Drafts of blocks: those of one call against those of single levels."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from outdraft.core.decision import LiveStop
from outdraft.core.draft import DraftSource, TreeShape
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.asks import DraftModelAsk, StateWindow
from outdraft.drafting.device.block_drafter import BlockDrafter, num_spare_blocks
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kv.cache import KVCache
from outdraft.models.decoder.loader import load_model
from outdraft.models.drafters.dflash import DFlashNetwork, load_dflash
from outdraft.models.drafters.tables import TargetTables
from tests.drafting.same_drafts import check_same_drafts
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import TINY
from tests.models.head_checkpoints import tiny_target
from tests.oracle.heads import random_head
from tests.sampling_batches import batch_of_params

VOCAB, SLOTS, NUM_ROWS, MOST_TOKENS, DEPTH = TINY["vocab_size"], 4, 3, 17, 4
BLOCKS_EACH = -(-(MOST_TOKENS + DEPTH) // SLOTS)
TEXTS_SL = torch.randint(0, VOCAB, (NUM_ROWS, 20), generator=torch.Generator().manual_seed(1))
GREEDY, DRAWN = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
SEEDED = SamplingParams(temperature=1.0, seed=3)  # drafted with the target's noise
CUT = SamplingParams(temperature=0.8, top_k=9, logit_bias={3: 2.0})
SHAPES = [TreeShape.chain(DEPTH), TreeShape.chain(2), TreeShape((3, 2, 2)), TreeShape((2, 4, 1, 3))]


@dataclass(frozen=True)
class Case:
    """A batch; `price`: of the rule of every second request; None: there are no rules."""

    shape: TreeShape
    params: list[SamplingParams]
    num_tokens: list[int]
    num_rows: list[int]
    price: float | None


@st.composite
def cases(draw: st.DrawFn) -> Case:
    every = st.lists(st.sampled_from([GREEDY, DRAWN, SEEDED, CUT]), min_size=1, max_size=NUM_ROWS)
    params, shape = draw(every), draw(st.sampled_from(SHAPES))
    return Case(
        shape,
        params,
        num_tokens=[draw(st.integers(3, MOST_TOKENS)) for _ in params],
        num_rows=[draw(st.integers(1, shape.num_rows)) for _ in params],
        price=draw(st.none() | st.sampled_from([0.05, 0.3, 0.6])) if shape.is_chain else None,
    )


@pytest.fixture(scope="module", params=["dflash", "dspark"])
def network(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> DFlashNetwork:
    folder: Path = tmp_path_factory.mktemp("checkpoint")
    tiny_target(folder)
    target = load_model(folder / "target", torch.float32, "cpu", cpu_kernels())
    path = random_head(request.param, folder / "target", folder / "drafter")
    return load_dflash(path, TargetTables(target))


def propose(network: DFlashNetwork, case: Case) -> DraftBatch:
    """The texts are read in two parts, so that a context of the first one is there already."""
    num_spare = NUM_ROWS * num_spare_blocks(network.config.block_size, SLOTS)
    num_blocks = NUM_ROWS * BLOCKS_EACH
    sizes = num_blocks + num_spare, SLOTS, network.dtype, network.device
    cache = KVCache(network.shard.cache_shapes, *sizes)
    for layer in cache.layers:
        layer.k_PSGC.zero_()
        layer.v_PSGE.zero_()
    window = StateWindow(NUM_ROWS, network.feature_size, network.dtype, network.device, 20)
    window.features_NF.normal_(generator=torch.Generator().manual_seed(4))
    drafter = BlockDrafter(network, cache, 64, DraftSource.DFLASH, window)
    proposer = DeviceProposer(cpu_kernels(), drafter, case.shape, samples=True)
    blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(2)).tolist()
    asks: list[DraftModelAsk] = []
    for row, (length, rows) in enumerate(zip(case.num_tokens, case.num_rows, strict=True)):
        has_rule = case.price is not None and row % 2 == 0
        rule = LiveStop((0.3,) * DEPTH, (-0.5,) * DEPTH, case.price or 0.0, row_cap=6)
        num_blocks_of_text = -(-(length + rows) // SLOTS)
        own = blocks[BLOCKS_EACH * row :][: min(BLOCKS_EACH, num_blocks_of_text)]
        levels = () if case.shape.is_chain else case.shape.levels
        stop = rule if has_rule else None
        asks.append(DraftModelAsk(row, length, 0, rows, own, stop=stop, levels=levels))
    sampling = batch_of_params(
        case.params, seeds=range(len(case.params)), vocab_size=VOCAB, device="cpu"
    )
    with torch.inference_mode():
        earlier = [
            structs.replace(ask, num_tokens=ask.num_tokens // 2 + 1, stop=None) for ask in asks
        ]
        proposer.propose(earlier, TEXTS_SL, sampling)
        later = [structs.replace(ask, num_computed=ask.num_tokens // 2) for ask in asks]
        return proposer.propose(later, TEXTS_SL, sampling)


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_a_block_in_one_call_is_that_of_single_levels(network: DFlashNetwork, case: Case):
    mine = propose(network, case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "draft", lambda unread, growth: None)
        theirs = propose(network, case)
    check_same_drafts(mine, theirs)
