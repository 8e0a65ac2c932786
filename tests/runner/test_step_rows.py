"""The rows of a step against a loop over works; tests/kernels compares the libraries."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from outdraft.attention.rows import RowBatch
from outdraft.core.draft import Draft, DraftSource
from outdraft.core.plan import Admission, DraftChoice, TokenRules, Work
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.torch.rows import append_token_ids
from outdraft.runner.state import DeviceState, RequestSlot, StepTexts
from outdraft.runner.step_rows import step_spans
from tests.row_batches import row_batch

CPU = torch.device("cpu")
BLOCK, ROW_LEN = 4, 65


class Batch:
    """Works of requests in slots 0, 1, ..., and what the runner keeps of these."""

    def __init__(self) -> None:
        self.works: list[Work] = []
        self.slots: dict[int, RequestSlot] = {}

    def add(
        self,
        num_tokens: int,
        num_prompt: int,
        start: int,
        num_new: int,
        blocks: list[int],
        drafts: DraftChoice | None = None,
    ) -> None:
        slot, ids = len(self.works), np.ones(num_tokens, dtype=np.int32)
        samples = start + num_new == num_tokens
        work = Work(slot, start, num_new, samples, drafts, new_block_ids=tuple(blocks))
        self.slots[slot] = RequestSlot(
            Admission(slot, ids, num_prompt, TokenRules(SamplingParams(), seed=0))
        )
        self.slots[slot].update(work)
        self.works.append(work)


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Prompt chunks, plain rows, chains and trees of the host, places for the model's drafts."""
    batch = Batch()
    for slot in range(draw(st.integers(1, 4))):
        num_tokens = draw(st.integers(1, 30))
        start = draw(st.integers(0, num_tokens - 1))
        num_new = draw(st.integers(1, num_tokens - start))
        samples = start + num_new == num_tokens
        number = draw(st.integers(0, 6)) if samples else 0
        parents = tuple(draw(st.integers(0, row)) for row in range(number))
        drafts = None
        if number:
            host = DraftChoice(DraftSource.SUFFIX, Draft(tuple(range(50, 50 + number)), parents))
            model = DraftChoice(DraftSource.MODEL, num_model_drafts=number)
            drafts = draw(st.sampled_from([host, model]))
        num_blocks = -(-(start + num_new + number) // BLOCK)
        blocks = np.random.default_rng(slot).permutation(40)[:num_blocks].tolist()
        num_prompt = draw(st.integers(1, num_tokens))
        batch.add(num_tokens, num_prompt, start, num_new, blocks, drafts)
    return batch


def drafts_of(works: list[Work]) -> DraftBatch:
    chosen = [work.drafts for work in works if work.samples]
    chains = [Draft.chain(range(70, 70 + len(choice))) if choice else Draft() for choice in chosen]
    return DraftBatch.from_drafts(chains, CPU)


def placed_rows(batch: Batch, drafts: DraftBatch) -> RowBatch:
    spans, facts = step_spans(batch.works, batch.slots, ROW_LEN)
    return row_batch(spans, BLOCK, CPU, drafts.width, facts)


@given(batches())
def test_every_row_stands_where_a_loop_over_the_works_says(batch):
    works, drafts = batch.works, drafts_of(batch.works)
    rows = placed_rows(batch, drafts)
    row, logit_rows, place = 0, [], 0
    for work in works:
        slots = [block * BLOCK + i for block in work.new_block_ids for i in range(BLOCK)]
        for k in range(work.num_new):
            assert rows.state_index_T[row + k] == work.slot * ROW_LEN + work.start + k
            assert rows.draft_index_T[row + k] == -1
        row += work.num_new
        if work.samples:
            logit_rows += list(range(row - 1, row + work.num_drafts))
            behind = slots[work.start + work.num_new :][: work.num_drafts]
            padded = behind + [-1] * (drafts.width - work.num_drafts)
            assert rows.draft_slots_BN[place].tolist() == padded
            for k in range(work.num_drafts):
                assert rows.draft_index_T[row + k] == place * drafts.width + k
            expected = [work.slot, work.num_tokens, batch.slots[work.slot].num_prompt]
            assert [int(one[place]) for one in StepTexts(*rows.extra)] == expected
            place += 1
        row += work.num_drafts
    assert rows.logit_rows_R.tolist() == logit_rows
    assert len(rows.state_index_T) == row


def test_emitted_tokens_follow_the_text_and_padding_goes_nowhere():
    state = DeviceState(3, 8, CPU)
    emitted = torch.tensor([[7, 8, -1], [9, -1, -1]])
    append_token_ids(state.token_ids_SL, torch.tensor([2, 0]), torch.tensor([5, 1]), emitted)
    want = torch.zeros(3, 8, dtype=torch.int64)
    want[2, 5], want[2, 6], want[0, 1] = 7, 8, 9
    assert torch.equal(state.token_ids_SL[:, :8], want)
