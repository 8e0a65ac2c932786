"""Texts of which it is known where a network drafts the next token, and where it does not.

Each text is written token by token: the network drafts behind the text so far, and then comes what
it drafted, or something else.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from outdraft.core.draft import HEAD_WINDOW, MAX_TAUGHT, MAX_TAUGHT_ROWS, DraftSource
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.head_drafter import MedusaDrafter, MLPSpeculatorDrafter
from outdraft.drafting.device.model_drafts import DraftModelAsk
from outdraft.drafting.device.network_drafter import NetworkDrafter
from outdraft.drafting.device.parallel_drafting import ParallelDrafter
from outdraft.drafting.device.proposer import DeviceProposer, Drafter
from outdraft.drafting.device.target_states import TargetStates
from outdraft.kernels.draft_ops import ModelDrafts
from outdraft.models.medusa import load_medusa
from outdraft.models.mlp_speculator import load_mlp_speculator
from outdraft.models.target_tables import TargetTables
from tests.drafting.small_networks import BLOCK_SIZE, random_window, small_network
from tests.folders import new_folder
from tests.kernels.tables import kernels_for
from tests.models.eagle_checkpoints import VOCABULARY
from tests.models.head_checkpoints import (
    VOCAB,
    medusa_config,
    medusa_tensors,
    mlp_config,
    mlp_tensors,
    random_hidden,
    tiny_target,
    write,
)
from tests.sampling_batches import batch_of_params

NUM_TEXTS, LENGTH, NUM_DRAFTS, MASK = 5, 24, 3, 2
BLOCKS_EACH = -(-(LENGTH + NUM_DRAFTS) // BLOCK_SIZE)
NETWORKS = ("language model", "eagle", "eagle3", "parallel")
HEADS = ("medusa", "mlp_speculator")
DRAFTED_AS = {
    "the best token": (SamplingParams(temperature=0.0, logit_bias={4: 0.5}), True),
    "the best token with the noise of both": (SamplingParams(temperature=0.8, seed=7), True),
    "the best token of those that are not drawn": (SamplingParams(temperature=0.8), False),
}


@cache
def network(kind: str):
    return small_network(kind, NUM_TEXTS * BLOCKS_EACH, new_folder())


@cache
def heads(kind: str):
    folder = new_folder()
    target = tiny_target(folder, torch.float32)
    if kind == "medusa":
        path = write(folder, medusa_config(NUM_DRAFTS), medusa_tensors(NUM_DRAFTS))
        return load_medusa(path, TargetTables(target))
    path = write(folder, mlp_config(NUM_DRAFTS), mlp_tensors(NUM_DRAFTS))
    return load_mlp_speculator(path, TargetTables(target))


def drafter_of(kind: str, max_rows: int) -> Drafter:
    """A fresh one; those that read states have them of all tokens that they need."""
    if kind in HEADS:
        return heads_of(kind)
    drafting, cache = network("language model" if kind == "parallel" else kind)
    for layer in cache.layers:
        layer.k_PSGC.fill_(0)
        layer.v_PSGE.fill_(0)
    if kind == "parallel":
        return ParallelDrafter(drafting, cache, max_rows, DraftSource.MODEL, MASK)
    window = random_window(drafting, NUM_TEXTS, LENGTH)
    return NetworkDrafter(drafting, cache, max_rows, DraftSource.EAGLE3, window)


def heads_of(kind: str) -> Drafter:
    made = MedusaDrafter if kind == "medusa" else MLPSpeculatorDrafter
    drafter = made(heads(kind), NUM_TEXTS, kernels_for(torch.float32))
    for token in range(LENGTH - 1 - HEAD_WINDOW, LENGTH - 1):
        rows_T = torch.arange(NUM_TEXTS)
        places_T = rows_T * HEAD_WINDOW + token % HEAD_WINDOW
        hidden_TD = random_hidden(NUM_TEXTS, torch.float32, seed=token)
        kept = hidden_TD, hidden_TD[:, None, :0], places_T, rows_T, places_T
        drafter.keep(TargetStates(*kept, token_ids_SL=torch.zeros(1, 1)))
    return drafter


def vocabulary(kind: str) -> int:
    return VOCAB if kind in HEADS else VOCABULARY


def ask_of(text: int, num_tokens: int = LENGTH, num_computed: int = 0, most: int = 0):
    blocks = range(text * BLOCKS_EACH, (text + 1) * BLOCKS_EACH)
    return DraftModelAsk(text, num_tokens, num_computed, NUM_DRAFTS, blocks, max_taught=most)


def propose(
    kind: str, asks: Sequence[DraftModelAsk], texts_SL: Tensor, how: str, max_rows: int = 1000
) -> ModelDrafts:
    params, samples = DRAFTED_AS[how]
    sampling = batch_of_params(
        [params] * len(asks),
        seeds=[5 + ask.state_row for ask in asks],
        vocab_size=vocabulary(kind),
        device="cpu",
    )
    drafter = drafter_of(kind, max_rows)
    proposer = DeviceProposer(kernels_for(torch.float32), drafter, None, samples=samples)
    with torch.inference_mode():
        return proposer.propose(asks, texts_SL, sampling)


def texts_with(kind: str, how: str, right: Collection[tuple[int, int]]) -> Tensor:
    """[S, L]: texts whose last tokens the network drafts behind those before, where it is `right`:
    (text, tokens behind its own)."""
    size = vocabulary(kind)
    generator = torch.Generator().manual_seed(len(right))
    texts_SL = torch.randint(0, size, (NUM_TEXTS, LENGTH), generator=generator)
    for place in range(LENGTH - MAX_TAUGHT, LENGTH):
        asks = [ask_of(text, place) for text in range(NUM_TEXTS)]
        drafts = propose(kind, asks, texts_SL, how).token_ids_BK[:, 0].tolist()
        for text, draft in enumerate(drafts):
            is_right = (text, LENGTH - 1 - place) in right
            texts_SL[text, place] = draft if is_right else (draft + 1) % size
    return texts_SL


def taught(made: ModelDrafts) -> list[list[int]]:
    assert made.taught_B2 is not None
    return made.taught_B2.tolist()


def num_right(right: Collection[tuple[int, int]], text: int, count: int) -> int:
    return sum((text, behind) in right for behind in range(count))


PLACES = st.sets(
    st.tuples(st.integers(0, NUM_TEXTS - 1), st.integers(0, MAX_TAUGHT - 1)), min_size=1
)


@pytest.mark.parametrize("how", DRAFTED_AS)
@pytest.mark.parametrize("kind", [*NETWORKS, *HEADS])
@settings(max_examples=3, deadline=None)
@given(right=PLACES, counts=st.lists(st.integers(0, MAX_TAUGHT), min_size=2, max_size=4))
def test_a_network_that_is_right_so_often_is_found_right_so_often(
    kind: str, how: str, right: set[tuple[int, int]], counts: list[int]
):
    texts_SL = texts_with(kind, how, right)
    asks = [ask_of(text, most=count) for text, count in enumerate(counts)]
    made = propose(kind, asks, texts_SL, how)
    if not any(counts):
        assert made.taught_B2 is None
    else:
        want = [[count, num_right(right, text, count)] for text, count in enumerate(counts)]
        assert taught(made) == want
    plain = propose(kind, [replace(ask, max_taught=0) for ask in asks], texts_SL, how)
    assert torch.equal(made.token_ids_BK, plain.token_ids_BK)


@pytest.mark.parametrize("kind", ["eagle3", "parallel", "medusa"])
def test_a_step_compares_no_more_than_it_has_room_for(kind: str):
    how, right = "the best token", {(text, 1) for text in range(NUM_TEXTS)}
    texts_SL = texts_with(kind, how, right)
    asks = [ask_of(text, most=MAX_TAUGHT) for text in range(NUM_TEXTS)]
    assert NUM_TEXTS * MAX_TAUGHT > MAX_TAUGHT_ROWS == 4 * MAX_TAUGHT
    assert taught(propose(kind, asks, texts_SL, how)) == [[MAX_TAUGHT, 1]] * 4 + [[0, 0]]


@pytest.mark.parametrize("kind", NETWORKS)
def test_of_a_long_backlog_the_last_pass_is_compared(kind: str):
    how, right = "the best token", {(text, behind) for text in (0, 1) for behind in (0, 2, 3, 5)}
    texts_SL = texts_with(kind, how, right)
    asks = [ask_of(text, most=MAX_TAUGHT) for text in (0, 1)]
    found = taught(propose(kind, asks, texts_SL, how, max_rows=13))
    assert 0 < sum(count for count, _ in found) < 2 * MAX_TAUGHT
    for text, (count, own) in enumerate(found):
        assert own == num_right(right, text, count)
