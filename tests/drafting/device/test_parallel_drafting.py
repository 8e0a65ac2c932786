"""Parallel drafting against a dense pass over the whole text and its mask tokens."""

import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from outdraft.attention.base import AttentionMetadata, LayerCache
from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError
from outdraft.distributed.group import RequestShares
from outdraft.drafting.device.asks import DraftModelAsk, StateWindow, TargetStates
from outdraft.drafting.device.network_drafter import DraftNetwork, NetworkDrafter, mask_token_id
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.torch.table import reference_kernels
from outdraft.kv.block_pool import LayerCacheShape
from outdraft.kv.cache import KVCache
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.loader import load_model
from tests.drafting.drafting import SEEDED, check_drafts, sampling_batch, texts
from tests.kernels.tables import cpu_kernels, kernels_for
from tests.models.checkpoints import TINY, VARIANTS, randomised, save
from tests.reference.parallel import draft_logits

VOCAB, MASK = TINY["vocab_size"], 59
BLOCK, BLOCKS_EACH = 4, 8
STATE_ROWS = [4, 0, 2, 5]
TEXTS_SL = texts(VOCAB)


class RecordingNetwork(DraftNetwork):
    """Counts the rows of every pass."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(model)
        self.num_rows: list[int] = []

    def read(self, token_ids_T: Tensor, *others: Any) -> Tensor:
        self.num_rows.append(len(token_ids_T))
        return super().read(token_ids_T, *others)


class Pair:
    """A network of ours and the same of transformers'."""

    def __init__(self, variant: str, folder: Path, dtype: torch.dtype) -> None:
        self.theirs: PreTrainedModel = randomised(VARIANTS[variant]())
        path = save(self.theirs, folder)
        self.theirs = self.theirs.double()
        kernels = reference_kernels() if dtype is torch.float64 else cpu_kernels()
        self.model = load_model(path, dtype, "cpu", kernels)

    def proposer(self, max_rows: int = 1000, *, samples: bool = True) -> DeviceProposer:
        config = self.model.config
        cache = KVCache(
            config.cache_shapes,
            4 * BLOCKS_EACH,
            BLOCK,
            self.model.dtype,
            self.model.device,
        )
        self.network = RecordingNetwork(self.model)
        drafter = NetworkDrafter(
            self.network, cache, max_rows, DraftSource.MODEL, mask_token_id=MASK
        )
        return DeviceProposer(self.model.kernels, drafter, None, samples=samples)

    def check(
        self,
        made: DraftBatch,
        asks: Sequence[DraftModelAsk],
        chosen: Sequence[int],
        **options: Any,
    ) -> None:
        def logits_of(ask: DraftModelAsk) -> Any:
            text = TEXTS_SL[ask.state_row, : ask.num_tokens].tolist()
            rows_KV = draft_logits(self.theirs, text, ask.num_drafts, MASK)
            return lambda drafted: rows_KV[len(drafted)].tolist()

        tolerance = 1e-6 if self.model.dtype is torch.float64 else 1e-4
        next_logits = [logits_of(ask) for ask in asks]
        check_drafts(made, asks, chosen, next_logits, tolerance=tolerance, **options)


@pytest.fixture(
    scope="module",
    params=[
        ("qwen2-window", torch.float64),
        ("qwen3", torch.float32),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}".replace("torch.", ""),
)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(request.param[0], tmp_path_factory.mktemp("pair"), request.param[1])


def asks_for(
    chosen: Sequence[int],
    lengths: Sequence[int],
    drafts: Sequence[int],
    computed: Sequence[int] | None = None,
) -> list[DraftModelAsk]:
    blocks = torch.randperm(4 * BLOCKS_EACH, generator=torch.Generator().manual_seed(2))
    computed = computed or [0] * len(chosen)
    return [
        DraftModelAsk(
            STATE_ROWS[i],
            length,
            done,
            count,
            blocks[i * BLOCKS_EACH : (i + 1) * BLOCKS_EACH].tolist(),
        )
        for i, length, done, count in zip(chosen, lengths, computed, drafts, strict=True)
    ]


BATCHES = {
    "greedy": ([0], [9], [4]),
    "sampled": ([1, 2, 3], [5, 12, 8], [4, 4, 4]),
    "mixed": ([2, 0, 3, 1], [9, 1, 6, 13], [3, 3, 3, 3]),
    "of different lengths": ([3, 0, 1, 2], [9, 1, 6, 13], [1, 4, 2, 5]),
    "of one draft each": ([1, 0], [7, 4], [1, 1]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("seeded", SEEDED.values(), ids=SEEDED)
def test_every_request_gets_what_a_dense_pass_over_its_masks_says(
    batch: str, seeded: Collection[int], pair: Pair
):
    """Ids, and the probabilities of the processed logits that they were drawn from."""
    chosen, lengths, drafts = BATCHES[batch]
    asks = asks_for(chosen, lengths, drafts)
    proposer = pair.proposer()

    made = proposer.propose(asks, TEXTS_SL, sampling_batch(chosen, VOCAB, seeded=seeded))

    pair.check(made, asks, chosen, seeded=seeded)
    assert pair.network.num_rows == [sum(lengths) + sum(drafts) - len(drafts)]


def test_masks_leave_nothing_behind_for_the_next_steps(pair: Pair):
    """The network counts as far as the text: what it read behind that is written again."""
    chosen, lengths = [1, 0, 3], [6, 10, 3]
    proposer, sampling = pair.proposer(), sampling_batch(chosen, VOCAB)
    computed = [0, 0, 0]
    for emitted in ([1, 3, 5], [4, 1, 2], [2, 6, 1], [0, 0, 0]):
        asks = asks_for(chosen, lengths, [5, 3, 4], computed=computed)

        made = proposer.propose(asks, TEXTS_SL, sampling)

        pair.check(made, asks, chosen)
        assert proposer.drafter.max_kept == 0
        computed = lengths
        lengths = [length + more for length, more in zip(lengths, emitted, strict=True)]


def test_long_backlogs_are_read_in_passes_of_bounded_size(pair: Pair):
    chosen, lengths, drafts = [2, 1, 0], [24, 3, 17], [5, 4, 1]
    asks = asks_for(chosen, lengths, drafts)
    proposer = pair.proposer(max_rows=12)

    made = proposer.propose(asks, TEXTS_SL, sampling_batch(chosen, VOCAB))

    pair.check(made, asks, chosen)
    assert max(pair.network.num_rows) <= 12
    assert sum(pair.network.num_rows) == sum(lengths) + sum(drafts) - 3


def test_a_proposer_that_does_not_sample_takes_the_best_tokens(pair: Pair):
    asks = asks_for([1, 2], [7, 9], [4, 2])

    made = pair.proposer(samples=False).propose(asks, TEXTS_SL, sampling_batch([1, 1], VOCAB))

    pair.check(made, asks, [0, 0])


class ScriptedNetwork:
    """A network whose token_shift is 1 that keeps what it is given to read."""

    token_shift = 1
    feature_size = 3
    taps, reads_hidden = (1,), False
    kernels = reference_kernels()

    def __init__(self) -> None:
        self.read_rows: list[tuple[Tensor, Tensor | None, AttentionMetadata]] = []

    def features(self, states: TargetStates) -> Tensor:
        raise NotImplementedError

    def read(
        self,
        token_ids_T: Tensor,
        states_TD: Tensor | None,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
    ) -> Tensor:
        self.read_rows.append((token_ids_T, states_TD, metadata))
        return token_ids_T[:, None].double()

    def logits(self, states_RD: Tensor, shares: RequestShares) -> Tensor:
        return -(states_RD + 1 - torch.arange(VOCAB)).abs()


def test_masks_of_a_network_with_states_read_the_learned_one():
    window = StateWindow(6, 3, torch.float64, torch.device("cpu"), num_tokens=5)
    window.features_NF.normal_()
    state_D = torch.tensor([7.0, 8.0, 9.0], dtype=torch.float64)
    network = ScriptedNetwork()
    drafter = NetworkDrafter(
        network,
        KVCache(
            [LayerCacheShape(1, 2, 2)], 4 * BLOCKS_EACH, BLOCK, torch.float64, torch.device("cpu")
        ),
        100,
        DraftSource.EAGLE3,
        window,
        mask_token_id=MASK,
        mask_state_D=state_D,
    )
    proposer = DeviceProposer(kernels_for(torch.float64), drafter, None, samples=True)
    [ask] = asks_for([0], [7], [3], computed=[4])

    made = proposer.propose([ask], TEXTS_SL, sampling_batch([0], VOCAB))

    [(ids_T, states_TD, metadata)] = network.read_rows
    text = TEXTS_SL[ask.state_row]
    assert states_TD is not None
    # A token is read with the state before it, and kept at the place of that.
    assert ids_T.tolist() == [int(text[5]), int(text[6]), MASK, MASK]
    assert metadata.positions_T.tolist() == [4, 5, 6, 7]
    slots = [ask.block_ids[p // BLOCK] * BLOCK + p % BLOCK for p in range(4, 8)]
    assert metadata.slots_T.tolist() == slots
    kept = [window.features_NF[ask.state_row * 5 + place] for place in (4, 0)]  # of tokens 4 and 5
    assert torch.equal(states_TD, torch.stack([*kept, state_D, state_D]))
    assert made.token_ids_BN.tolist() == [[int(text[6]) + 1, MASK + 1, MASK + 1]]
    assert proposer.drafter.max_kept == -1
    assert drafter.state_window == 5
    assert drafter.taps == (1,)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"pard_token": 5, "mask_token_id": 6}, 5),
        ({"mask_token_id": 6, "ptd_token_id": 7}, 6),
        ({"pard_token": None, "ptd_token_id": 0}, 0),
    ],
)
def test_the_mask_token_is_what_the_checkpoint_names(
    config: dict[str, Any], found: int, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(config))

    assert mask_token_id(tmp_path, 10) == found


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "was not trained for parallel drafting: .* none of pard_token, mask_token_id"),
        ({"pard_token": 10}, "pard_token must be a token id below 10, got 10"),
        ({"ptd_token_id": -1}, "ptd_token_id must be a token id below 10, got -1"),
        ({"mask_token_id": "5"}, "mask_token_id must be a token id below 10, got '5'"),
    ],
)
def test_a_checkpoint_without_a_mask_token_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
):
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match=message):
        mask_token_id(tmp_path, 10)


@pytest.mark.gpu
def test_drafts_on_a_gpu_are_those_of_a_dense_pass(tmp_path: Path):
    pair = Pair("llama", tmp_path, torch.float64)
    pair.model = load_model(tmp_path, torch.float64, "cuda", reference_kernels())
    chosen, lengths, drafts = BATCHES["of different lengths"]
    asks = asks_for(chosen, lengths, drafts)

    made = pair.proposer().propose(asks, TEXTS_SL.cuda(), sampling_batch(chosen, VOCAB, "cuda"))

    assert made.probs_BNV is not None
    assert made.is_sampled_BN is not None
    on_cpu = replace(
        made,
        token_ids_BN=made.token_ids_BN.cpu(),
        probs_BNV=made.probs_BNV.cpu(),
        is_sampled_BN=made.is_sampled_BN.cpu(),
    )
    pair.check(on_cpu, asks, chosen)
