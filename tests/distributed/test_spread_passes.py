"""Compiled passes and drafts of networks that are spread over ranks which share memory."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import PreTrainedModel

from outdraft.core.decision import LiveStop
from outdraft.core.draft import DraftSource, TreeShape
from outdraft.core.errors import RanksError
from outdraft.core.sampling import SamplingParams
from outdraft.distributed.group import RankGroup, Ranks, RequestShares
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.drafting.device.network_drafter import DraftNetwork, NetworkDrafter
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.kernels.choose import choose_kernels, has_library
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.native.decoder import NativeDecoder
from outdraft.kernels.torch.decoder import TorchDecoder
from outdraft.kv.cache import KVCache
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.loader import load_model
from outdraft.models.drafters.eagle import load_eagle
from outdraft.models.drafters.tables import TargetTables
from tests.attention.causal import causal_metadata
from tests.drafting.device.test_network_drafter import SingleLevels
from tests.drafting.same_drafts import check_same_drafts
from tests.drafting.small_networks import random_window
from tests.models.checkpoints import (
    TINY,
    VARIANTS,
    chunked_logits,
    llama,
    random_tokens,
    randomised,
    save,
)
from tests.models.eagle_checkpoints import LAYOUTS, VOCABULARY, save_random_target
from tests.ranks import on_ranks
from tests.sampling_batches import batch_of_params

pytestmark = pytest.mark.skipif(not has_library(), reason="no library for this machine")

CPU, VOCAB, HIDDEN, LAYERS = (
    torch.device("cpu"),
    *(TINY[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers")),
)
DTYPES = [torch.float32, torch.bfloat16]
# Biases, tied heads, query-key norms and windows; 2 kv heads are fewer than 4 ranks, 4 are not.
MODELS = VARIANTS | {"long": lambda: llama(max_position_embeddings=400)}
FAMILIES = ["llama-biases", "llama-tied", "llama-one-head-each", "qwen2", "qwen3-window"]


def reads_one_input_each(model: PreTrainedModel) -> PreTrainedModel:
    """Each output of a summed product is one input times a power of two: a sum over ranks, and the
    roundings of its parts, then change no bit."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                num_outputs, num_inputs = weight.shape
                chosen_E = torch.randint(0, num_inputs, (num_outputs,), generator=generator)
                factor_E = 2.0 ** torch.randint(-2, 2, (num_outputs,), generator=generator)
                weight.zero_()
                weight[torch.arange(num_outputs), chosen_E] = factor_E
    return model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Directories of such models, each made once."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            model = reads_one_input_each(randomised(MODELS[family]()))
            made[family] = save(model, tmp_path_factory.mktemp(family))
        return made[family]

    return of


def load(path: Path, group: RankGroup, dtype: torch.dtype, **options: Any) -> CausalLM:
    return load_model(path, dtype, CPU, choose_kernels("auto", CPU, dtype), group=group, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_over_ranks_has_the_bits_of_one(
    family: str, size: int, dtype: torch.dtype, checkpoint: Callable[[str], Path]
):
    path, ids_T, chunks = checkpoint(family), random_tokens(64), [1, 20, 5, 38]
    whole = load(path, Ranks().target, dtype)
    want_TV = chunked_logits(whole, ids_T, chunks)

    def logits(ranks: Ranks) -> Tensor:
        model = load(path, ranks.target, dtype)
        assert isinstance(model.passes, NativeDecoder)
        return chunked_logits(model, ids_T, chunks)

    got_TV = torch.cat(on_ranks(size, 1, logits), dim=1)

    assert want_TV.std() > 0.3  # there is something to get wrong
    assert torch.equal(got_TV[:, :VOCAB], want_TV)
    assert (got_TV[:, VOCAB:] == -torch.inf).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_tapped_on_each_rank_has_the_bits_of_one(
    dtype: torch.dtype, checkpoint: Callable[[str], Path]
):
    path = checkpoint("qwen2")

    def tapped(ranks: Ranks) -> Tensor:
        model = load(path, ranks.target, dtype)
        return run_pass(model, 11, taps=(0, 2, LAYERS))[1]

    want_TKD = tapped(Ranks())
    assert all(torch.equal(got_TKD, want_TKD) for got_TKD in on_ranks(2, 1, tapped))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 4])
def test_the_best_tokens_of_all_ranks_are_those_of_one(
    size: int, dtype: torch.dtype, checkpoint: Callable[[str], Path]
):
    """In blocks of rows, and where all logits are NaN or equal."""
    path, num_rows = checkpoint("llama-tied"), 150
    hidden_RD = torch.randn(num_rows, HIDDEN, generator=torch.Generator().manual_seed(3)).to(dtype)
    hidden_RD[3], hidden_RD[140] = torch.nan, 0.0
    want_R, is_finite_R = load(path, Ranks().target, dtype).checked_best_tokens(hidden_RD)
    assert want_R[3] == want_R[140] == 0
    assert is_finite_R.tolist() == [row != 3 for row in range(num_rows)]

    def best(ranks: Ranks) -> tuple[Tensor, Tensor]:
        found = load(path, ranks.target, dtype).checked_best_tokens(hidden_RD)
        assert ranks.target.calls == {"gather": 1}
        assert ranks.target.sent_bytes == {"gather": (size - 1) * num_rows * (8 + 8)}
        return found

    for got_R, is_finite in on_ranks(size, 1, best):
        assert torch.equal(got_R, want_R)
        assert torch.equal(is_finite, is_finite_R)


def test_a_nan_of_one_rank_is_the_best_of_all_and_the_first_one_wins(tmp_path: Path):
    model = randomised(llama())
    with torch.no_grad():
        model.lm_head.weight[[VOCAB // 2 + 3, VOCAB - 1]] = torch.nan
    path = save(model, tmp_path)
    hidden_RD = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(3))

    def best(ranks: Ranks) -> tuple[Tensor, Tensor]:
        return load(path, ranks.target, torch.float32).checked_best_tokens(hidden_RD)

    for size in (2, 4):
        for got_R, is_finite_R in on_ranks(size, 1, best):
            assert got_R.tolist() == [VOCAB // 2 + 3] * 5
            assert not is_finite_R.any()


@pytest.mark.parametrize("num_rows", [13, 400])  # of the larger one each product is cut
def test_sums_inside_of_a_pass_are_counted(num_rows: int, checkpoint: Callable[[str], Path]):
    path, size = checkpoint("long"), 2
    row_bytes, cuts = HIDDEN * 2, -(-num_rows // 288)

    def traffic(ranks: Ranks) -> None:
        model = load(path, ranks.target, torch.bfloat16)
        assert not ranks.target.calls
        run_pass(model, num_rows, wanted=[num_rows - 1])
        sums, in_last = 1 + 2 * (LAYERS - 1) * cuts, 2
        assert ranks.target.calls == {"sum": sums + in_last}
        rows = (1 + 2 * (LAYERS - 1)) * num_rows + in_last  # the last layer leaves out the others
        assert ranks.target.sent_bytes == {"sum": (size - 1) * rows * row_bytes}

    on_ranks(size, 1, traffic)


def test_ranks_without_common_memory_go_layer_by_layer(checkpoint: Callable[[str], Path]):
    path, ids_T = checkpoint("qwen2"), random_tokens(9)

    def logits(ranks: Ranks) -> Tensor:
        model = load(path, ranks.target, torch.float32)
        assert isinstance(model.passes, TorchDecoder)
        return chunked_logits(model, ids_T, [9])

    assert len(on_ranks(2, 1, logits, over_memory=[None] * 2)) == 2


@pytest.mark.slow
@pytest.mark.parametrize("aborts", [True, False])
def test_a_rank_that_never_comes_ends_a_pass(aborts: bool, checkpoint: Callable[[str], Path]):
    path, failures, is_over = checkpoint("qwen2"), list[str](), threading.Event()

    def work(ranks: Ranks) -> None:
        model = load(path, ranks.target, torch.float32)
        ranks.target.meet(CPU)
        if ranks.target.rank == 1:
            if aborts:
                threading.Timer(0.2, ranks.abort).start()
            assert is_over.wait(20.0)
            return
        with pytest.raises(RanksError) as error:
            run_pass(model, 3)
        failures.append(str(error.value))
        with pytest.raises(RanksError, match="has ended"):
            run_pass(model, 3)
        is_over.set()

    on_ranks(2, 1, work, timeout_s=30.0 if aborts else 0.5)
    assert failures[0].endswith("has ended" if aborts else "in time")


def run_pass(
    model: CausalLM, num_rows: int, taps: Sequence[int] = (), wanted: Sequence[int] | None = None
) -> tuple[Tensor, Tensor]:
    """States and taps of the first tokens of a text."""
    cache = KVCache(model.shard.cache_shapes, 1, num_rows, model.dtype, CPU)
    metadata = causal_metadata(0, num_rows, torch.arange(num_rows), torch.zeros(1).int())
    wanted_R = None if wanted is None else torch.tensor(wanted)
    ids_T = random_tokens(num_rows)
    return model.forward_tapped(ids_T, cache.layers, metadata, taps, wanted_R)


SLOTS, MOST_TOKENS, MOST_REQUESTS = 4, 17, 4
SHAPES = [TreeShape.chain(4), TreeShape.chain(1), TreeShape((3, 2, 2)), TreeShape((2, 4, 1, 3))]
BLOCKS_EACH = -(-(MOST_TOKENS + max(shape.num_rows for shape in SHAPES)) // SLOTS)
TEXTS_SL = torch.randint(
    0, VOCABULARY, (MOST_REQUESTS, MOST_TOKENS), generator=torch.Generator().manual_seed(1)
)
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, seed=3),  # drafted with the target's noise
    SamplingParams(temperature=0.8, top_k=9, logit_bias={3: 2.0}),
]


OnRank = tuple[DraftNetwork, RankGroup]


@dataclass(frozen=True)
class Case:
    """A batch of all ranks; `counts`: requests of each; `price`: of every second request's rule;
    None: there are no rules."""

    shape: TreeShape
    params: Sequence[SamplingParams]
    counts: Sequence[int]
    num_tokens: Sequence[int]
    num_rows: Sequence[int]
    price: float | None

    @property
    def are_alike(self) -> bool:
        """Whether all requests have rows in all levels."""
        all_want_all = set(self.num_rows) == {self.shape.num_rows}
        return self.price is None and (all_want_all or not self.shape.is_chain)

    def asks(self) -> list[DraftModelAsk]:
        generator = torch.Generator().manual_seed(2)
        blocks = torch.randperm(MOST_REQUESTS * BLOCKS_EACH, generator=generator).tolist()
        levels = () if self.shape.is_chain else self.shape.levels
        depth = self.shape.depth
        rule = LiveStop((0.3,) * depth, (-0.5,) * depth, self.price or 0.0, row_cap=7)
        asks: list[DraftModelAsk] = []
        for i, (length, rows) in enumerate(zip(self.num_tokens, self.num_rows, strict=True)):
            own = blocks[BLOCKS_EACH * i :][:BLOCKS_EACH]
            stop = rule if self.price is not None and i % 2 == 0 else None
            asks.append(DraftModelAsk(i, length, 0, rows, own, stop=stop, levels=levels))
        return asks


@st.composite
def cases(draw: st.DrawFn) -> Case:
    params = draw(st.lists(st.sampled_from(PARAMS), min_size=1, max_size=MOST_REQUESTS))
    shape, first = draw(st.sampled_from(SHAPES)), draw(st.integers(0, len(params)))
    all_want_all = draw(st.booleans())
    return Case(
        shape,
        params,
        counts=(first, len(params) - first),
        num_tokens=[draw(st.integers(2, MOST_TOKENS)) for _ in params],
        num_rows=[
            shape.num_rows if all_want_all else draw(st.integers(1, shape.num_rows)) for _ in params
        ],
        price=draw(st.none() | st.sampled_from([0.05, 0.3, 0.6])) if shape.is_chain else None,
    )


@pytest.fixture(scope="module", params=["language model", "eagle", "eagle3", "bfloat16"])
def networks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[OnRank]:
    """Those of two ranks, which share it."""
    folder, kind = tmp_path_factory.mktemp("checkpoints"), request.param
    target_path = save_random_target(folder / "target")
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    path = LAYOUTS[kind].save(folder) if kind in LAYOUTS else None

    def network(ranks: Ranks) -> OnRank:
        if path is None:
            model = load(target_path, ranks.draft, dtype, drafts=True)
            return DraftNetwork(model), ranks.draft
        target = load(target_path, ranks.target, dtype)
        tables = TargetTables(target, ranks.draft, target_path)
        return DraftNetwork(load_eagle(path, tables)), ranks.draft

    return on_ranks(2, 2, network)


Proposed = tuple[DraftBatch, dict[str, int], dict[str, int]]  # and calls and bytes


def propose(networks: Sequence[OnRank], case: Case, *, is_whole: bool) -> list[Proposed]:
    """What each rank drafts, all at once."""
    ends = [*accumulate(case.counts, initial=0)]

    def on_rank(rank: int) -> Proposed:
        network, group = networks[rank]
        shape = network.network.shard
        own = slice(ends[rank], ends[rank + 1])
        cache = KVCache(
            shape.cache_shapes, MOST_REQUESTS * BLOCKS_EACH, SLOTS, network.network.dtype, CPU
        )
        window = random_window(network, MOST_REQUESTS, MOST_TOKENS)
        reads: Any = network if is_whole else SingleLevels(network)
        drafter = NetworkDrafter(reads, cache, 100, DraftSource.EAGLE3, window)
        proposer = DeviceProposer(network.kernels, drafter, case.shape, samples=True)
        sampling = batch_of_params(
            case.params[own],
            seeds=range(len(case.params))[own],
            vocab_size=VOCABULARY,
            device=CPU,
        )
        calls, sent = group.calls, group.sent_bytes
        calls.clear()
        sent.clear()
        shares = RequestShares(group, tuple(case.counts))
        with torch.inference_mode():
            drafts = proposer.propose(case.asks(), TEXTS_SL, sampling, shares=shares)
        return drafts, dict(calls), dict(sent)

    with ThreadPoolExecutor(len(networks)) as pool:
        return [*pool.map(on_rank, range(len(networks)))]


@settings(max_examples=25, deadline=None)
@given(case=cases())
def test_a_draft_in_one_call_is_that_of_single_levels(networks: list[OnRank], case: Case):
    found = propose(networks, case, is_whole=True), propose(networks, case, is_whole=False)
    for (mine, calls, sent), (theirs, their_calls, their_sent) in zip(*found, strict=True):
        check_same_drafts(mine, theirs)
        assert sent["sum"] <= their_sent["sum"]  # the last layer leaves out rows that nobody wants
        if case.are_alike:
            assert calls == their_calls
            assert sent | {"sum": 0} == their_sent | {"sum": 0}
        else:  # what has ended is no longer read
            assert all(count <= their_calls[name] for name, count in calls.items())
            assert all(count <= their_sent[name] for name, count in sent.items())
