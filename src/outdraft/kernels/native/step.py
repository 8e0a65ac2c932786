"""A step of a target, and the places of its rows, by the compiled library: csrc/step.cpp, rows.cpp.

Dimension key: R rows whose logits or states are wanted, T rows, K tapped layers, D hidden.
"""

from array import array
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from outdraft.attention.rows import RowBatch, Span
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.decoder_ops import Choice, StatePlaces, StatesOf, StepRead, StepTask
from outdraft.kernels.native.library import Library, Struct
from outdraft.kernels.native.sampling import blank_verdict, cut_columns, penalty_columns

_LIKELIEST, _BY_RULE = 1, 2  # `Chooses` of csrc/step.cpp


class RowArrays:
    """Arguments of `place_rows`, and memory for its result.

    Attributes:
        counts: the fields of `RowCounts`, csrc/rows.h.
        numbers, block_table, placed: its other arguments.
    """

    def __init__(
        self, spans: Sequence[Span], extra: Sequence[Sequence[int]], block_size: int, width: int
    ) -> None:
        table_width = max([len(span.block_ids) for span in spans])
        works, parents, blocks = array("q"), array("q"), array("i")
        for context_len, count, up, block_ids, text_start, samples in spans:
            works.extend((context_len, count, len(up), text_start, samples))
            parents.extend(up)
            blocks.extend(block_ids)
            blocks.extend([0] * (table_width - len(block_ids)))
        num_works, num_drafts = len(spans), len(parents)
        num_sampling = sum([span.samples for span in spans])
        num_rows = sum([span.num_causal for span in spans]) + num_drafts
        self._extra_lengths = [len(numbers) for numbers in extra]
        self.counts = {
            "num_works": num_works,
            "num_rows": num_rows,
            "num_logits": num_sampling + num_drafts,
            "num_sampling": num_sampling,
            "num_extra": sum(self._extra_lengths),
            "table_width": table_width,
            "block_size": block_size,
            "width": width,
        }
        for numbers in (parents, *extra):
            works.extend(numbers)
        self.numbers = torch.frombuffer(works, dtype=torch.int64)
        self.block_table = torch.frombuffer(blocks, dtype=torch.int32)
        self._lengths = [*[num_rows] * 5, num_sampling + num_drafts, num_sampling]
        self._lengths += [num_sampling * width, *self._extra_lengths]
        # int32 numbers fill whole words: one more where they are odd.
        num_words = (3 * num_works + 2 + len(blocks)) // 2
        self.placed = torch.zeros(sum(self._lengths) + num_words, dtype=torch.int64)
        self._spans = spans

    def rows(self) -> RowBatch:
        """The placed rows, as views."""
        spans, num_works, num_sampling = self._spans, len(self._spans), self.counts["num_sampling"]
        num_words = len(self.placed) - sum(self._lengths)
        *parts, words = self.placed.split([*self._lengths, num_words])
        starts = [num_works + 1, num_works, num_works, len(self.block_table)]
        starts.append(2 * num_words - sum(starts))
        query_start, contexts, causal, table, _ = words.view(torch.int32).split(starts)
        return RowBatch(
            query_start_B1=query_start,
            context_lens_B=contexts,
            num_causal_B=causal,
            ancestors_T=parts[0],
            positions_T=parts[1],
            slots_T=parts[2],
            block_table_BP=table.view(num_works, -1),
            max_rows=max([span.num_rows for span in spans]),
            max_seq_len=max([span.context_len + span.num_rows for span in spans]),
            state_index_T=parts[3],
            draft_index_T=parts[4],
            logit_rows_R=parts[5],
            root_rows_B=parts[6],
            draft_slots_BN=parts[7].view(num_sampling, self.counts["width"]),
            extra=tuple(parts[8:]),
        )


class NativeRows:
    """The operations of csrc/rows.cpp. Tensors are on the CPU."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._place_rows = library.function("place_rows")
        self._copy_rows = library.function("copy_rows")

    def place_rows(
        self, spans: Sequence[Span], extra: Sequence[Sequence[int]], block_size: int, width: int
    ) -> RowBatch:
        arrays = RowArrays(spans, extra, block_size, width)
        counts = self._library.struct("RowCounts", **arrays.counts)
        self._place_rows(counts, arrays.numbers, arrays.block_table, arrays.placed)
        return arrays.rows()

    def copy_rows(
        self, to_ND: Tensor, places_R: Tensor | None, from_TD: Tensor, rows_R: Tensor | None = None
    ) -> None:
        assert to_ND.dtype is from_TD.dtype, "rows of two dtypes"
        listed_R = places_R if places_R is not None else rows_R
        assert listed_R is not None
        row_bytes = to_ND.shape[1] * to_ND.element_size()
        self._copy_rows(len(listed_R), row_bytes, to_ND, places_R, from_TD, rows_R)


def step_task(
    library: Library, task: StepTask, size: int, dtype: torch.dtype
) -> tuple[Struct, StepRead]:
    """The task of a call, and the results that it writes.

    Args:
        size, dtype: D of the decoder's states, and their type.
    """
    arrays = RowArrays(task.spans, task.facts, task.block_size, task.width)
    counts, drafts, sampling = arrays.counts, task.drafts, task.sampling
    num_rows, num_sampling = counts["num_rows"], counts["num_sampling"]
    states_RD = tapped_TKD = choice = kept = None
    fields: dict[str, Any] = {}
    if task.states_of is not StatesOf.NO_ROW:
        is_all = task.states_of is StatesOf.ALL_ROWS
        num_wanted = num_rows if is_all else counts["num_logits"]
        states_RD = torch.empty((num_wanted, size), dtype=dtype)
        tapped_TKD = torch.empty((num_rows, len(task.taps), size), dtype=dtype)
    if drafts is not None:
        fields["draft_ids"] = drafts.token_ids_BN
        fields["draft_parents"] = drafts.parents_BN
        fields["num_drafts"] = drafts.num_drafts_B
    if sampling is not None:
        assert drafts is not None
        verdict = blank_verdict(num_sampling, task.width)
        choice = Choice(verdict, torch.empty(counts["num_logits"], dtype=torch.bool))
        fields["emitted"], fields["num_emitted"] = verdict.token_ids_BN1, verdict.num_emitted_B
        fields["accepted"], fields["are_finite"] = verdict.rows_BN, choice.is_finite_R
        if task.window:
            lengths = num_rows, counts["num_works"], counts["num_works"]
            kept = StatePlaces(*[torch.empty(one, dtype=torch.int64) for one in lengths])
            names = "state_places", "last_rows", "last_places"
            fields |= zip(names, kept, strict=True)
        fields["chooses"] = _LIKELIEST
        if not sampling.is_plain_greedy:
            fields |= _rules(sampling, drafts)
            fields["rule"] = task.rule
    native = library.struct(
        "StepTask",
        **counts,
        **fields,
        numbers=arrays.numbers,
        block_table=arrays.block_table,
        placed=arrays.placed,
        texts=task.token_ids_SL,
        row_len=task.token_ids_SL.shape[1],
        are_shaped=task.are_shaped,
        states_of=task.states_of,
        taps=task.taps or None,
        num_taps=len(task.taps),
        window=task.window,
        tapped=tapped_TKD,
        states=states_RD,
    )
    return native, StepRead(arrays.rows, task.states_of, states_RD, tapped_TKD, choice, kept)


def _rules(sampling: SamplingBatch, drafts: DraftBatch) -> dict[str, Any]:
    """The fields of `ChoiceRules`, csrc/step.cpp."""
    return {
        **cut_columns(sampling),
        **(penalty_columns(sampling) if sampling.needs_penalties else {}),
        "chooses": _BY_RULE,
        "is_greedy": sampling.is_greedy_B,
        "draws": sampling.draws_B,
        "seeds": sampling.seeds_B,
        "probs": drafts.probs_BNV,
        "is_sampled": drafts.is_sampled_BN,
        "sampled_trees": drafts.sampled_trees,
    }
