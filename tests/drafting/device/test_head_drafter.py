"""Drafts of Medusa heads and MLP speculators against their slow twins, request by request."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outdraft.core.draft import HEAD_WINDOW
from outdraft.core.sampling import SamplingParams
from outdraft.drafting.device.asks import DraftModelAsk, TargetStates
from outdraft.drafting.device.head_drafter import HeadDrafter
from outdraft.drafting.device.proposer import DeviceProposer
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import Frontier
from outdraft.kernels.torch.table import reference_kernels
from outdraft.models.drafters.medusa import load_medusa
from outdraft.models.drafters.mlp_speculator import load_mlp_speculator
from outdraft.models.drafters.tables import TargetTables
from tests.drafting.drafting import NUM_STATE_ROWS, SEEDED, check_drafts, sampling_batch, texts
from tests.kernels.tables import kernels_for
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
from tests.reference import medusa as slow_medusa
from tests.reference import mlp_speculator as slow_mlp

NUM_HEADS = 4
KNOWN = 40  # of the vocabulary, by the Medusa heads
TOKEN_MAP = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))[:KNOWN]
STATE_ROWS, LENGTHS = [4, 0, 2, 5], [9, 3, 20, 14]
TEXTS_SL = texts(VOCAB)


class Drafter:
    """A kind of heads: how its proposer is built, and what it should say."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind = kind
        target = tiny_target(folder, torch.float32)
        self.hidden_SD = random_hidden(NUM_STATE_ROWS, torch.float32)
        if kind == "medusa":
            self.tensors = medusa_tensors(NUM_HEADS, known=KNOWN)
            config = medusa_config(NUM_HEADS, truncated_vocab_size=KNOWN)
            tensors = self.tensors | {"token_map": TOKEN_MAP}
            self.heads: Any = load_medusa(write(folder, config, tensors), TargetTables(target))
        else:
            self.tensors = mlp_tensors(NUM_HEADS)
            path = write(folder, mlp_config(NUM_HEADS, scale_input=True), self.tensors)
            self.heads = load_mlp_speculator(path, TargetTables(target))
        self.arrays = {name: tensor.double().numpy() for name, tensor in self.tensors.items()}

    def proposer(self, *, samples: bool = True) -> DeviceProposer:
        drafter = HeadDrafter(self.heads, NUM_STATE_ROWS, reference_kernels())
        drafter.keep(states(self.hidden_SD, range(NUM_STATE_ROWS), range(NUM_STATE_ROWS)))
        return DeviceProposer(kernels_for(torch.float32), drafter, None, samples=samples)

    def next_logits(self, ask: DraftModelAsk, drafted: Sequence[int]) -> list[float]:
        """Behind the newest token and these drafts."""
        hidden_D = self.hidden_SD[ask.state_row].double().numpy()
        if self.kind == "medusa":
            head = len(drafted)
            name = f"blocks.{head}.layers.0"
            blocks = [(self.arrays[f"{name}.weight"], self.arrays[f"{name}.bias"])]
            weight = self.arrays[f"lm_heads.{head}.weight"]
            known = slow_medusa.head_logits(hidden_D, blocks, weight)
            return slow_medusa.over_vocabulary(
                known, TOKEN_MAP.tolist(), VOCAB, float("-inf")
            ).tolist()
        newest = int(TEXTS_SL[ask.state_row, ask.num_tokens - 1])
        return slow_mlp.chain_logits(
            hidden_D,
            [newest, *drafted],
            self._mlp_weights,
            n_predict=NUM_HEADS,
            scale_input=True,
        )[-1].tolist()

    def _mlp_weights(self, part: str, head: int) -> Any:
        name = f"speculator.{part}.{head}"
        if part == "ln":
            return self.arrays[f"{name}.weight"], self.arrays[f"{name}.bias"]
        return self.arrays[f"{name}.weight"]


@pytest.fixture(scope="module", params=["medusa", "mlp_speculator"])
def drafter(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    return Drafter(request.param, tmp_path_factory.mktemp(request.param))


def states(hidden_TD: Tensor, last_rows: Sequence[int], state_rows: Sequence[int]) -> TargetStates:
    """A step whose last rows computed the second newest token of each text."""
    places = list[int]()
    for state_row in state_rows:
        length = LENGTHS[STATE_ROWS.index(state_row)] if state_row in STATE_ROWS else 9
        places.append(state_row * HEAD_WINDOW + (length - 2) % HEAD_WINDOW)
    return TargetStates(
        hidden_TD,
        hidden_TD.new_empty(len(hidden_TD), 0, hidden_TD.shape[1]),
        torch.full((len(hidden_TD),), -1),
        torch.tensor(list(last_rows), dtype=torch.int64),
        torch.tensor(places, dtype=torch.int64),
        TEXTS_SL,
    )


def asks_for(chosen: Sequence[int], drafts: Sequence[int]) -> list[DraftModelAsk]:
    return [
        DraftModelAsk(STATE_ROWS[i], LENGTHS[i], 0, count, ())
        for i, count in zip(chosen, drafts, strict=True)
    ]


def check(
    drafter: Drafter,
    made: DraftBatch,
    asks: Sequence[DraftModelAsk],
    chosen: Sequence[int],
    **options: Any,
) -> None:
    next_logits = [lambda drafted, ask=ask: drafter.next_logits(ask, drafted) for ask in asks]
    check_drafts(made, asks, chosen, next_logits, **options)


BATCHES = {
    "greedy": ([0], [4]),
    "sampled": ([1, 2, 3], [4, 4, 4]),
    "mixed": ([2, 0, 3, 1], [3, 3, 3, 3]),
    "of different lengths": ([3, 0, 1, 2], [1, 4, 2, 3]),
}


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("seeded", SEEDED.values(), ids=SEEDED)
def test_every_request_gets_what_it_gets_alone(
    batch: str, seeded: Collection[int], drafter: Drafter
):
    """Ids, and the probabilities of the processed logits that they were drawn from."""
    chosen, drafts = BATCHES[batch]
    asks = asks_for(chosen, drafts)

    made = drafter.proposer().propose(asks, TEXTS_SL, sampling_batch(chosen, VOCAB, seeded=seeded))

    check(drafter, made, asks, chosen, seeded=seeded)


def test_a_proposer_that_does_not_sample_takes_the_best_tokens(drafter: Drafter):
    asks = asks_for([1, 0, 2], [4, 2, 3])
    sampled, greedy = sampling_batch([1, 0, 1], VOCAB), sampling_batch([0, 0, 0], VOCAB)

    made = drafter.proposer(samples=False).propose(asks, TEXTS_SL, sampled)

    want = drafter.proposer().propose(asks, TEXTS_SL, greedy)
    assert made.probs_BNV is None
    assert want.probs_BNV is None
    assert torch.equal(made.token_ids_BN, want.token_ids_BN)
    check(drafter, want, asks, [0, 0, 0])


def test_a_greedy_request_with_a_bias_gets_the_best_processed_token(drafter: Drafter):
    params = [SamplingParams(temperature=0.0, logit_bias={7: 50.0, int(TOKEN_MAP[0]): 60.0})]
    [ask] = asks_for([0], [3])

    made = drafter.proposer().propose([ask], TEXTS_SL, sampling_batch([0], VOCAB, params=params))

    assert made.probs_BNV is None
    assert made.token_ids_BN.tolist() == [[int(TOKEN_MAP[0])] * 3]


def test_a_request_whose_tokens_no_head_knows_still_gets_a_distribution(drafter: Drafter):
    unknown = sorted(set(range(VOCAB)) - set(TOKEN_MAP.tolist()))
    params = [SamplingParams(temperature=1.0, allowed_token_ids=unknown)]

    made = drafter.proposer().propose(
        asks_for([0], [3]), TEXTS_SL, sampling_batch([0], VOCAB, params=params)
    )

    assert made.probs_BNV is not None
    torch.testing.assert_close(made.probs_BNV.sum(-1), torch.ones(1, 3))
    drawn = made.probs_BNV.gather(2, made.token_ids_BN[:, :, None])
    assert bool((drawn > 0).all())


def test_of_each_step_the_last_state_of_a_request_is_kept(drafter: Drafter):
    proposer = drafter.proposer()
    # Rows of three requests, one of which did not sample; row 1 was a draft that was refused.
    hidden_TD = random_hidden(6, torch.float32, seed=8)
    proposer.drafter.keep(states(hidden_TD, [0, 4], [STATE_ROWS[1], STATE_ROWS[2]]))
    moved = drafter.hidden_SD.clone()
    moved[STATE_ROWS[1]], moved[STATE_ROWS[2]] = hidden_TD[0], hidden_TD[4]
    other = drafter.proposer()
    other.drafter.keep(states(moved, range(NUM_STATE_ROWS), range(NUM_STATE_ROWS)))
    asks, sampling = asks_for([3, 1, 2], [4, 4, 4]), sampling_batch([3, 1, 2], VOCAB)

    made = proposer.propose(asks, TEXTS_SL, sampling)

    want = other.propose(asks, TEXTS_SL, sampling)
    before = drafter.proposer().propose(asks, TEXTS_SL, sampling)
    assert made.probs_BNV is not None
    assert want.probs_BNV is not None
    assert before.probs_BNV is not None
    assert torch.equal(made.probs_BNV, want.probs_BNV)
    is_same_B = (made.probs_BNV == before.probs_BNV).flatten(1).all(1)
    assert is_same_B.tolist() == [True, False, False]


def test_a_step_in_which_nobody_samples_changes_nothing(drafter: Drafter):
    proposer = drafter.proposer()
    proposer.drafter.keep(states(random_hidden(5, torch.float32, seed=8), [], []))
    asks = asks_for([0], [4])

    made = proposer.propose(asks, TEXTS_SL, sampling_batch([0], VOCAB))

    check(drafter, made, asks, [0])


def test_more_drafts_than_heads_are_not_asked_for(drafter: Drafter):
    [wrong] = asks_for([0], [NUM_HEADS + 1])
    with pytest.raises(AssertionError, match="more drafts than"):
        drafter.proposer().propose([wrong], TEXTS_SL, sampling_batch([0], VOCAB))


def test_levels_give_the_logits_behind_every_node_of_a_tree(drafter: Drafter):
    asks = asks_for([2, 0], [NUM_HEADS, NUM_HEADS])
    generator = torch.Generator().manual_seed(4)
    levels = drafter.proposer().drafter.levels(asks, TEXTS_SL, NUM_HEADS)

    first_BV = levels.first_logits()

    for row, ask in enumerate(asks):
        want_V = torch.tensor(drafter.next_logits(ask, []))
        torch.testing.assert_close(first_BV[row], want_V.float(), rtol=1e-4, atol=1e-4)
    paths: list[list[list[int]]] = [[[]] for _ in asks]
    for level in range(1, NUM_HEADS):
        num_nodes = 3
        parents_BF = torch.randint(0, len(paths[0]), (len(asks), num_nodes), generator=generator)
        tokens_BF = torch.randint(0, VOCAB, (len(asks), num_nodes), generator=generator)
        unread = torch.zeros_like(tokens_BF)  # heads look at a node's token and its parent only
        got_BFV = levels.next_logits(Frontier(tokens_BF, parents_BF, unread, level, 0))
        assert got_BFV.shape == (len(asks), num_nodes, VOCAB)
        paths = [
            [
                [*paths[row][parent], token]
                for parent, token in zip(
                    parents_BF[row].tolist(), tokens_BF[row].tolist(), strict=True
                )
            ]
            for row in range(len(asks))
        ]
        for row, ask in enumerate(asks):
            for node, path in enumerate(paths[row]):
                want_V = torch.tensor(drafter.next_logits(ask, path)).float()
                torch.testing.assert_close(got_BFV[row, node], want_V, rtol=1e-4, atol=1e-4)
