"""The rows that a step computes: their tokens, their places, and those that need logits.

Dimension key: B requests that sample in this step, N most drafts of one of them, T rows,
R rows whose logits are needed, S state rows, L tokens, W works.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outdraft.attention.rows import RowBatch, Span
from outdraft.core.plan import Work
from outdraft.kernels.data.drafts import DraftBatch, Verdict
from outdraft.kernels.data.sampling import Paths, SamplingBatch
from outdraft.kernels.decoder_ops import Choice, StatePlaces, StatesOf, StepRead, StepTask
from outdraft.kernels.ops import Kernels, choose_by_parts
from outdraft.models.base import LanguageModel
from outdraft.runner.state import Slots, StepTexts, committed_paths
from outdraft.runner.verified_parts import step_parts
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
        placed = _shaped(placed, task, kernels)
    index_T, draft_index_T = placed.state_index_T, placed.draft_index_T
    ids_T = kernels.read_token_ids(texts_SL, drafts_BN, index_T, draft_index_T)
    states_RD, tapped_TKD = model.forward_tapped(
        ids_T,
        task.caches,
        placed,
        task.taps,
        None if task.states_of is StatesOf.ALL_ROWS else placed.logit_rows_R,
    )
    choice: Choice | None = None
    kept: StatePlaces | None = None
    if task.chooser is not None:
        wanted_RD = states_RD
        if task.states_of is StatesOf.ALL_ROWS:
            wanted_RD = with_logits(states_RD, placed.logit_rows_R)
        texts = StepTexts(*placed.extra)
        choice = _choice(model, verifier, task, texts, wanted_RD)
        emitted_BN1 = choice.verdict.token_ids_BN1
        kernels.append_token_ids(texts_SL, texts.rows_B, texts.num_tokens_B, emitted_BN1)
        if task.window:
            kept_rows_BN, row_len = choice.verdict.rows_BN, texts_SL.shape[1]
            kept = kernels.place_states(placed, kept_rows_BN, row_len, task.window)
    return StepRead(lambda: placed, states_RD, tapped_TKD, choice, kept)


def with_logits(states_TD: Tensor, logit_rows_R: Tensor) -> Tensor:
    """[R, D]: the states of the rows whose logits are needed."""
    if len(logit_rows_R) == len(states_TD):
        return states_TD
    # Indexing by a tensor would wake OpenMP threads, which then keep the cores of ours.
    return states_TD.index_select(0, logit_rows_R)


def _shaped(placed: RowBatch, task: StepTask, kernels: Kernels) -> RowBatch:
    """Replace the rows' positions and ancestors by those that follow from the drafts' parents."""
    assert task.drafts is not None
    parents_BN, draft_index_T = task.drafts.parents_BN.contiguous(), placed.draft_index_T
    positions_T, ancestors_T = kernels.shape_rows(
        parents_BN, draft_index_T, placed.positions_T, placed.ancestors_T
    )
    return replace(placed, positions_T=positions_T, ancestors_T=ancestors_T)


def _choice(
    model: LanguageModel, verifier: Verifier, task: StepTask, texts: StepTexts, states_RD: Tensor
) -> Choice:
    """By the states of the rows with logits, some requests after the other."""
    assert task.chooser is not None
    assert task.drafts is not None
    drafts, sampling, choose = task.drafts, task.chooser.sampling, model.kernels.choose
    if sampling.needs_history or model.vocabulary.group.size > 1:
        # Graphs have one shape, and texts grow. Ranks that share the vocabulary wait for each other
        # in between.
        choose = choose_by_parts
    num_drafts = [len(span.parents) for span in task.spans if span.samples]
    made: list[tuple[Verdict, Tensor]] = []
    for part in step_parts(model, states_RD, drafts, num_drafts):
        own = drafts, sampling, texts
        if part is not None:
            own = drafts.part(part), sampling.part(part.requests), texts.of(part.requests)
        paths: Paths | None = None
        if sampling.needs_history:
            longest = max(task.facts[1])
            paths = committed_paths(task.token_ids_SL, own[2], longest, own[1])
        own_RD = states_RD if part is None else states_RD[part.rows]
        choosing = _Choosing(model, verifier, paths)
        verdict, is_finite_R = choose(choosing, own_RD, *own[:2], own[2].num_tokens_B)
        if part is not None:  # the results of a graph hold until its next call
            verdict, is_finite_R = verdict.widened(drafts.width).copied(), is_finite_R.clone()
        made.append((verdict, is_finite_R))
    verdicts, are_finite = zip(*made, strict=True)
    return Choice(Verdict.joined(verdicts), torch.cat(are_finite))


@dataclass(frozen=True, slots=True)
class _Choosing:
    """Chooses tokens by states; implements `ops.Choosing`.

    Attributes:
        paths: None: no rule reads texts.
    """

    model: LanguageModel
    verifier: Verifier
    paths: Paths | None

    def __call__(
        self, states_RD: Tensor, drafts: DraftBatch, sampling: SamplingBatch, num_tokens_B: Tensor
    ) -> tuple[Verdict, Tensor]:
        if sampling.is_plain_greedy:
            best_R, is_finite_R = self.model.checked_best_tokens(states_RD)
            return self.model.kernels.match(best_R, drafts), is_finite_R
        logits_RV = self.model.logits(states_RD)
        is_finite_R = self.model.kernels.finite_rows(logits_RV)
        paths = self.paths or Paths(None, num_tokens_B, num_tokens_B, None)
        return self.verifier.verify(logits_RV, drafts, sampling, paths), is_finite_R


def _parents(work: Work) -> Sequence[int]:
    """Parents of the work's drafted rows; a chain stands where the network will draft a tree."""
    if work.drafts is None:
        return ()
    return range(len(work.drafts)) if work.drafts.num_model_drafts else work.drafts.draft.parents
