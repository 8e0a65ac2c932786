"""The rows of a step against a loop over works; tests/kernels compares the libraries."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from outdraft.core.draft import Draft, DraftSource
from outdraft.core.plan import DraftChoice, Work
from outdraft.core.request import Request
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.reference.table import reference_kernels
from outdraft.runner.device_state import DeviceState
from outdraft.runner.step_rows import StepRows, step_rows

CPU = torch.device("cpu")
BLOCK, ROW_LEN = 4, 65


@st.composite
def batches(draw: st.DrawFn) -> list[Work]:
    """Prompt chunks, plain rows, chains and trees of the host, places for the model's drafts."""
    works = []
    for slot in range(draw(st.integers(1, 4))):
        num_tokens = draw(st.integers(1, 30))
        request = Request(f"r{slot}", [1] * num_tokens, SamplingParams(), seed=0, max_model_len=64)
        request.slot = slot
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
        works.append(Work(request, start, num_new, blocks, samples, drafts))
    return works


def drafts_of(works: list[Work]) -> DraftBatch:
    chosen = [work.drafts for work in works if work.samples]
    chains = [Draft.chain(range(70, 70 + len(choice))) if choice else Draft() for choice in chosen]
    return DraftBatch.from_drafts(chains, CPU)


def rows_of(works: list[Work], drafts: DraftBatch) -> StepRows:
    return step_rows(works, drafts.width, BLOCK, ROW_LEN, CPU, reference_kernels())


@given(batches())
def test_every_row_stands_where_a_loop_over_the_works_says(works):
    drafts = drafts_of(works)
    rows = rows_of(works, drafts)
    row, logit_rows, place = 0, [], 0
    for work in works:
        slots = [block * BLOCK + i for block in work.block_ids for i in range(BLOCK)]
        for k in range(work.num_new):
            assert rows.state_index_T[row + k] == work.request.slot * ROW_LEN + work.start + k
            assert rows.draft_index_T[row + k] == -1
        row += work.num_new
        if work.samples:
            logit_rows += list(range(row - 1, row + work.num_drafts))
            behind = slots[work.start + work.num_new :][: work.num_drafts]
            padded = behind + [-1] * (drafts.width - work.num_drafts)
            assert rows.draft_slots_BN[place].tolist() == padded
            for k in range(work.num_drafts):
                assert rows.draft_index_T[row + k] == place * drafts.width + k
            request = work.request
            numbers = (rows.state_rows_B, rows.num_tokens_B, rows.prompt_lens_B)
            expected = [request.slot, request.num_tokens, request.num_prompt]
            assert [int(one[place]) for one in numbers] == expected
            place += 1
        row += work.num_drafts
    assert rows.logit_rows_R.tolist() == logit_rows
    assert len(rows.state_index_T) == row


def test_a_step_that_samples_nothing_reads_its_text():
    request = Request("r", [5, 6, 7, 8], SamplingParams(), seed=0, max_model_len=64)
    request.slot = 0
    rows = step_rows([Work(request, 1, 2, [0], False)], 0, BLOCK, ROW_LEN, CPU, reference_kernels())
    state = DeviceState(1, ROW_LEN - 1, CPU, reference_kernels())
    state.admit([request])
    assert state.read(rows, None).tolist() == [6, 7]
    assert state.read(rows, drafts_of([])).tolist() == [6, 7]


def test_drafted_rows_stand_behind_their_parents():
    works = [request_work(3, parents=(0, 0, 1)), request_work(5, parents=())]
    drafts = DraftBatch.from_drafts([Draft((7, 8, 9), (0, 0, 1)), Draft()], CPU)
    shaped = rows_of(works, drafts).shaped_by(drafts, reference_kernels()).metadata
    assert shaped.positions_T.tolist() == [2, 3, 3, 4, 4]
    assert shaped.ancestors_T.tolist() == [0, 0b001, 0b010, 0b101, 0]


def request_work(num_tokens: int, parents: tuple[int, ...]) -> Work:
    """Its newest token, and a draft that the network will shape."""
    request = Request("r", [1] * num_tokens, SamplingParams(), seed=0, max_model_len=64)
    request.slot = 0
    drafts = DraftChoice(DraftSource.MODEL, num_model_drafts=len(parents)) if parents else None
    return Work(request, num_tokens - 1, 1, [0, 1, 2, 3], True, drafts)


def test_emitted_tokens_follow_the_text_and_padding_goes_nowhere():
    state = DeviceState(3, 8, CPU, reference_kernels())
    emitted = torch.tensor([[7, 8, -1], [9, -1, -1]])
    state.append(torch.tensor([2, 0]), torch.tensor([5, 1]), emitted)
    want = torch.zeros(3, 8, dtype=torch.int64)
    want[2, 5], want[2, 6], want[0, 1] = 7, 8, 9
    assert torch.equal(state.token_ids_SL[:, :8], want)
