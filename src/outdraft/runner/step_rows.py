"""The rows that a step computes: their tokens, their places, and those that need logits.

Dimension key: B requests that sample in this step, N most drafts of one of them, T rows,
R rows whose logits are needed, S state rows, L tokens, W works.
"""

from collections.abc import Sequence
from dataclasses import replace

from outdraft.attention.rows import Span
from outdraft.core.plan import Work
from outdraft.kernels.decoder_ops import StatePlaces, StatesOf, StepRead, StepTask
from outdraft.kernels.torch.rows import append_token_ids, place_states, read_token_ids, shape_rows
from outdraft.models.base import LanguageModel
from outdraft.runner.state import Slots, StepTexts
from outdraft.runner.verified_parts import PartToVerify, PartVerifier
from outdraft.verification.verifier import Verifier


def step_spans(
    works: Sequence[Work], slots: Slots, row_len: int
) -> tuple[list[Span], tuple[list[int], list[int], list[int]]]:
    """The works' rows, and the numbers of `StepTexts`.

    Args:
        row_len: of the device state.
    """
    spans: list[Span] = []
    rows: list[int] = []
    lengths: list[int] = []
    prompts: list[int] = []
    for work in works:
        slot, row, parents = slots[work.slot], work.slot, _parents(work)
        spans.append(
            Span(work.start, work.num_new, parents, slot.block_ids, row * row_len, work.samples)
        )
        if work.samples:
            rows.append(row)
            lengths.append(work.num_tokens)
            prompts.append(slot.num_prompt)
    return spans, (rows, lengths, prompts)


def read_by_parts(model: LanguageModel, verifier: Verifier, task: StepTask) -> StepRead:
    """Lay the rows out, and send all of it in one copy; read them; verify their drafts, and find
    where states are kept."""
    kernels, spans, texts_SL = model.kernels, task.spans, task.token_ids_SL
    placed = kernels.place_rows(spans, task.facts, task.block_size, task.width)
    placed = placed.to(texts_SL.device)
    drafts_BN = texts_SL.new_empty(0, 0)
    if task.drafts is not None:
        drafts_BN = task.drafts.token_ids_BN.contiguous()
    if task.are_shaped:
        assert task.drafts is not None
        placed = shape_rows(task.drafts, placed)
    index_T, draft_index_T = placed.state_index_T, placed.draft_index_T
    ids_T = read_token_ids(texts_SL, drafts_BN, index_T, draft_index_T)
    states_RD, tapped_TKD = model.forward_tapped(
        ids_T,
        task.caches,
        placed,
        task.taps,
        None if task.states_of is StatesOf.ALL_ROWS else placed.logit_rows_R,
    )
    read = StepRead(lambda: placed, task.states_of, states_RD, tapped_TKD)
    if task.sampling is None:
        return read
    assert task.drafts is not None
    texts = StepTexts(*placed.extra)
    of_all = PartToVerify((), task.drafts, task.sampling, texts, None)
    parts = PartVerifier(model, verifier, texts_SL, max(task.facts[1]), task.width)
    num_drafts = [len(span.parents) for span in spans if span.samples]
    choice, _ = parts.verified(of_all, read.logit_states_RD, num_drafts, chooses=True)
    emitted_BN1 = choice.verdict.token_ids_BN1
    append_token_ids(texts_SL, texts.rows_B, texts.num_tokens_B, emitted_BN1)
    kept: StatePlaces | None = None
    if task.window:
        kept_rows_BN, row_len = choice.verdict.rows_BN, texts_SL.shape[1]
        kept = place_states(placed, kept_rows_BN, row_len, task.window)
    return replace(read, choice=choice, kept=kept)


def _parents(work: Work) -> Sequence[int]:
    """Parents of the work's drafted rows; a chain stands where the network will draft a tree."""
    if work.drafts is None:
        return ()
    return range(len(work.drafts)) if work.drafts.num_model_drafts else work.drafts.draft.parents
