"""The rows of a step against a loop over works, and compiled code against tensor operators."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outdraft.core.draft import Draft, DraftSource
from outdraft.core.plan import DraftChoice, Work
from outdraft.core.request import Request
from outdraft.core.sampling import SamplingParams
from outdraft.kernels.reference.table import reference_kernels
from outdraft.runner.device_state import DeviceState
from outdraft.runner.step_rows import StepRows, step_rows
from outdraft.verification.draft_batch import DraftBatch

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


@settings(deadline=None)  # the first example compiles
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


@settings(deadline=None)  # the first example compiles
@given(batches())
def test_compiled_and_tensor_code_read_the_same_tokens(works):
    drafts = drafts_of(works)
    rows = rows_of(works, drafts)
    texts_SL = torch.randint(0, 50, (4, ROW_LEN))
    got = rows.token_ids_on_cpu(texts_SL, drafts)
    assert torch.equal(got, rows.token_ids_on_any_device(texts_SL, drafts))
    assert torch.equal(got, rows.token_ids(texts_SL, drafts))


def test_a_step_that_samples_nothing_reads_its_text():
    request = Request("r", [5, 6, 7, 8], SamplingParams(), seed=0, max_model_len=64)
    request.slot = 0
    rows = step_rows([Work(request, 1, 2, [0], False)], 0, BLOCK, ROW_LEN, CPU, reference_kernels())
    texts_SL = torch.arange(ROW_LEN)[None] + 100
    assert rows.token_ids(texts_SL, None).tolist() == [101, 102]
    assert rows.token_ids_on_any_device(texts_SL, drafts_of([])).tolist() == [101, 102]


@settings(deadline=None)  # the first example compiles
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 6)), min_size=1, max_size=4))
def test_compiled_and_tensor_code_append_the_same_tokens(shapes):
    one, other = DeviceState(5, 64, CPU), DeviceState(5, 64, CPU)
    state_rows_B = torch.randperm(5)[: len(shapes)]
    starts_B = torch.tensor([start for start, _ in shapes])
    emitted = torch.full((len(shapes), 6), -1)
    for row, (_, number) in zip(emitted, shapes, strict=True):
        row[:number] = torch.randint(1, 99, (number,))
    one.append(state_rows_B, starts_B, emitted)
    other.append_on_any_device(state_rows_B, starts_B, emitted)
    assert torch.equal(one.token_ids_SL[:, :64], other.token_ids_SL[:, :64])
    assert one.token_ids_SL.any()
