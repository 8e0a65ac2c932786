"""Growing trees, and whole drafts of blocks, by the compiled library.

Dimension key: B requests that draft, G those of all ranks that share a drafter, S texts, L levels
(or tokens of a text), K drafts, F size of a feature, V vocabulary.
"""

from array import array
from typing import Any

import torch
from torch import Tensor

from outdraft.kernels import draft_ops
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import (
    DraftGrower,
    DraftStart,
    DrawnLevel,
    Frontier,
    Growth,
    LevelTask,
    TreeLevels,
    UnreadTexts,
    side_shares,
)
from outdraft.kernels.native.library import Library, Struct
from outdraft.kernels.native.sampling import cut_columns

_DRAWN, _RANKED_WITH_NOISE = 1, 2  # `Kind` of csrc/growth.h; 0: ranked
_SIDE_SHARES = torch.tensor(side_shares(64))  # a level has no more rows


class NativeDrafting:
    """Levels of trees (csrc/drawn_level.cpp), and whole drafts of networks that give the logits of
    one level after the other."""

    def __init__(self, library: Library) -> None:
        self._library, self._place_level = library, library.function("place_level")
        self._draw_level = library.function("draw_level", releases_gil=True)
        self._create, self._destroy = (
            library.function(f"growth_{verb}") for verb in ("create", "destroy")
        )
        self._extend = library.function("growth_extend", releases_gil=True)
        self._finish = library.function("growth_finish")

    def draw_level(self, logits_BEV: Tensor, weight_BE: Tensor, task: LevelTask) -> DrawnLevel:
        num_requests, num_nodes, size = logits_BEV.shape
        shape_BF = (num_requests, task.num_rows)
        _check_level(num_nodes, task.num_rows, size)
        level = DrawnLevel(
            torch.zeros(shape_BF, dtype=torch.int64),
            torch.zeros(shape_BF, dtype=torch.int64),
            torch.zeros(shape_BF, dtype=torch.bool),
            torch.empty(*shape_BF, size),
            torch.zeros(shape_BF),
        )
        self._draw_level(
            *(num_requests, num_nodes, size, task.num_rows, task.first_above),
            self._library.struct("Worth", **_worth(min(task.num_rows, size) - 1)),
            *(logits_BEV, weight_BE, task.num_kept_B, task.positions_B, task.num_tokens_B),
            *(task.seeds_B, task.draws_B, level.token_ids_BF, level.origins_BF),
            *(level.is_drawn_BF, level.probs_BFV, level.weight_BF),
        )
        return level

    def place_level(
        self, ancestors_BF: Tensor, first_row: int, num_drafts_B: Tensor, start: DraftStart
    ) -> tuple[Tensor, Tensor, Tensor]:
        placed_3T = torch.empty(3, ancestors_BF.numel(), dtype=torch.int64)
        ancestors_T, positions_T, slots_T = placed_3T.unbind()
        self._place_level(
            *(*ancestors_BF.shape, first_row, ancestors_BF, start.contexts_B, num_drafts_B),
            *(start.block_table_BP, start.block_table_BP.shape[1], start.block_size),
            *(ancestors_T, positions_T, slots_T),
        )
        return ancestors_T, positions_T, slots_T

    def grow(self, levels: TreeLevels, growth: Growth, by_levels: DraftGrower) -> DraftBatch:
        (task, drafts), num_requests = draft_task(self._library, growth), len(growth.num_tokens_B)
        handle = self._create(task)
        try:
            first_row, frontier = 0, None
            for depth, width in enumerate(growth.shape.levels, start=1):
                logits = levels.next_logits(frontier) if frontier else levels.first_logits()
                rows_3BF = torch.empty(3, num_requests, width, dtype=torch.int64)
                if self._extend(handle, logits, rows_3BF) == 0:
                    break
                frontier = Frontier(*rows_3BF.unbind(), depth=depth, first_row=first_row)
                first_row += width
            self._finish(handle)
        finally:
            self._destroy(handle)
        return drafts


def draft_task(library: Library, growth: Growth) -> tuple[Struct, DraftBatch]:
    """The task of a call, and the drafts that it writes.

    Raises:
        ValueError: the vocabulary cannot fill a level.
    """
    sampling, shape, stops = growth.sampling, growth.shape, growth.stops
    num_requests = len(growth.num_tokens_B)
    shape_BK = num_requests, shape.num_rows
    for num_nodes, num_rows in zip((1, *shape.levels), shape.levels, strict=False):
        _check_level(num_nodes, num_rows, sampling.vocab_size)
    draws = growth.samples and sampling.any_draws
    is_drawn_BK = torch.empty(shape_BK, dtype=torch.bool)
    drafts = DraftBatch(
        torch.empty(shape_BK, dtype=torch.int64),
        torch.empty(shape_BK, dtype=torch.int64),
        growth.num_drafts_B if stops is None else torch.empty(num_requests, dtype=torch.int64),
        torch.empty(*shape_BK, sampling.vocab_size) if draws else None,
        is_drawn_BK if draws else None,
        is_chain=shape.is_chain,
        sampled_trees=not shape.is_chain,
        all_sampled=draws and sampling.all_draw,
        margins_BL=None if stops is None else torch.empty(num_requests, shape.depth),
    )
    fields: dict[str, Any] = {}
    if stops is not None:
        assert stops.weights_BL.shape == (len(growth.num_drafts_G), shape.depth)
        fields = {
            "weights": stops.weights_BL,
            "biases": stops.biases_BL,
            "price": stops.price_B,
            "has_rule": stops.has_rule_B,
            "room": int(stops.room_1),
            "margins": drafts.margins_BL,
            "num_drafted": drafts.num_drafts_B,
        }
    task = library.struct(
        "DraftTask",
        num_requests=num_requests,
        num_levels=shape.depth,
        num_rows=shape.num_rows,
        size=sampling.vocab_size,
        levels=shape.levels,
        **_worth(0),  # each level sets the number of shares
        num_tokens=growth.num_tokens_B,
        num_drafts=growth.num_drafts_B,
        seeds=sampling.seeds_B,
        kinds=_kinds(growth),
        is_greedy=sampling.is_greedy_B,
        **cut_columns(sampling),
        allowed=sampling.allowed_BV,
        bias=sampling.bias_BV,
        token_ids=drafts.token_ids_BN,
        parents=drafts.parents_BN,
        is_drawn=is_drawn_BK,
        probs=drafts.probs_BNV,
        **fields,
    )
    return task, drafts


def unread_texts(library: Library, unread: UnreadTexts, dtype: torch.dtype) -> Struct:
    """`dtype`: of the states that the network reads."""
    table_width = max([len(span.block_ids) for span in unread.spans])
    numbers, blocks = array("q"), array("i")
    num_skipped = unread.num_skipped or [0] * len(unread.spans)
    for (context_len, count, _, block_ids, text_start, _), skipped in zip(
        unread.spans, num_skipped, strict=True
    ):
        numbers.extend((context_len, count, text_start, skipped))
        blocks.extend(block_ids)
        blocks.extend([0] * (table_width - len(block_ids)))
    features_NF = unread.features_NF
    assert features_NF is None or features_NF.dtype is dtype
    return library.struct(
        "UnreadTexts",
        spans=torch.frombuffer(numbers, dtype=torch.int64),
        places=unread.places,
        texts=unread.token_ids_SL,
        features=features_NF,
        block_table=torch.frombuffer(blocks, dtype=torch.int32),
        table_width=table_width,
        block_size=unread.block_size,
    )


def _worth(num_shares: int) -> dict[str, Any]:
    """The fields of `Worth`, csrc/drafting.h."""
    return {
        "rank0_base": draft_ops.RANK0_BASE,
        "rank0_slope": draft_ops.RANK0_SLOPE,
        "own_base": draft_ops.OWN_BASE,
        "own_slope": draft_ops.OWN_SLOPE,
        "side_weight": draft_ops.SIDE_WEIGHT,
        "num_shares": num_shares,
        "side_shares": _SIDE_SHARES,
    }


def _check_level(num_nodes: int, num_rows: int, size: int) -> None:
    most = num_nodes * min(num_rows, size)
    if most < num_rows:
        raise ValueError(f"{most} tokens cannot fill {num_rows} rows of a level")


def _kinds(growth: Growth) -> Tensor:
    """int64 [B]."""
    sampling = growth.sampling
    if not growth.samples or sampling.all_greedy:
        return torch.zeros_like(sampling.seeds_B)
    return sampling.draws_B * _DRAWN + sampling.shares_noise_B * _RANKED_WITH_NOISE
