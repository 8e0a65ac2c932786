"""Growing trees by the compiled library.

Dimension key: B requests that draft, G those of all ranks that share a drafter, S texts, L levels
(or tokens of a text), K drafts, F size of a feature, V vocabulary.
"""

import ctypes
import functools
from array import array
from collections.abc import Callable
from ctypes import POINTER, c_double, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from outdraft.kernels import draft_ops
from outdraft.kernels.draft_ops import (
    DraftStart,
    DrawnLevel,
    Frontier,
    Growth,
    LevelTask,
    ModelDrafts,
    StopRules,
    TreeLevels,
    UnreadTexts,
    side_shares,
)
from outdraft.kernels.native.arrays import Addresses, address_of, addresses, array_address
from outdraft.kernels.native.library import Library
from outdraft.kernels.native.ranks import RankLink


class CUnreadTexts(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("spans", "places", "texts", "features")),
        ("block_table", c_void_p),
        *((name, c_int64) for name in ("table_width", "block_size")),
    )


class UnreadArrays:
    """Unread texts as arguments of a call, which must be over before this ends."""

    def __init__(self, unread: UnreadTexts, dtype: torch.dtype) -> None:
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
        num_numbers = len(numbers)
        numbers.extend(unread.places)
        self._numbers, self._blocks = numbers, blocks
        spans, features_NF = numbers.buffer_info()[0], unread.features_NF
        self.native = CUnreadTexts(
            spans,
            spans + num_numbers * numbers.itemsize,
            address_of(unread.token_ids_SL, torch.int64),
            None if features_NF is None else address_of(features_NF, dtype),
            blocks.buffer_info()[0],
            table_width,
            unread.block_size,
        )


class CDraftShares(ctypes.Structure):
    _fields_ = (("num_requests", c_int64), ("counts", POINTER(c_int64)), ("num_drafts", c_void_p))


def shares_of(growth: Growth) -> CDraftShares:
    """The requests of each rank, of a network that is spread; the growth must live as long."""
    num_drafts_G, counts = growth.num_drafts_G, growth.shares.counts
    counts_t = (c_int64 * len(counts))(*counts)  # the structure keeps it alive
    return CDraftShares(len(num_drafts_G), counts_t, address_of(num_drafts_G, torch.int64))


class NativeDrafting:
    """The operations of csrc/drawn_level.cpp."""

    def __init__(self, library: Library) -> None:
        self._place_level = library.function(
            "place_level",
            [*[c_int64] * 3, *[c_void_p] * 4, c_int64, c_int64, *[c_void_p] * 3],
        )

        self._draw_level = library.function(
            "draw_level",
            [*[c_int64] * 5, POINTER(_CWorth), *[c_void_p] * 12],
            releases_gil=True,
        )

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
        worth = _worth(min(task.num_rows, size) - 1)
        columns = (task.num_kept_B, task.positions_B, task.num_tokens_B, task.seeds_B, task.draws_B)
        given = [one.contiguous() for one in (logits_BEV, weight_BE, *columns)]
        self._draw_level(
            num_requests,
            num_nodes,
            size,
            task.num_rows,
            task.first_above,
            ctypes.byref(worth),
            *addresses(*given, level.token_ids_BF, level.origins_BF, level.is_drawn_BF),
            *addresses(level.probs_BFV, level.weight_BF),
        )
        return level

    def place_level(
        self, ancestors_BF: Tensor, first_row: int, num_drafts_B: Tensor, start: DraftStart
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_requests, width = ancestors_BF.shape
        ancestors_BF = ancestors_BF.contiguous()
        contexts_B, num_drafts_B = start.contexts_B.contiguous(), num_drafts_B.contiguous()
        placed_3T = torch.empty(3, num_requests * width, dtype=torch.int64)
        ancestors_T, positions_T, slots_T = placed_3T.unbind()
        self._place_level(
            num_requests,
            width,
            first_row,
            *addresses(ancestors_BF, contexts_B, num_drafts_B),
            address_of(start.block_table_BP, torch.int32),
            start.block_table_BP.shape[1],
            start.block_size,
            *addresses(ancestors_T, positions_T, slots_T),
        )
        return ancestors_T, positions_T, slots_T


class _CWorth(ctypes.Structure):
    _fields_ = (
        *((name, c_double) for name in ("rank0_base", "rank0_slope", "own_base", "own_slope")),
        ("side_weight", c_double),
        ("num_shares", c_int64),
        ("side_shares", c_void_p),
    )


class _DraftColumns(ctypes.Structure):
    """The part of `DraftTask` that says how requests choose."""

    _fields_ = (
        *((name, c_void_p) for name in ("seeds", "kinds", "is_greedy")),
        *((name, c_void_p) for name in ("temperature", "least", "top_k", "top_p")),
        *((name, c_void_p) for name in ("allowed", "bias")),
    )


class _CStops(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("weights", "biases", "price", "has_rule")),
        ("room", c_int64),
        *((name, c_void_p) for name in ("margins", "num_drafted")),
    )


class CDraftTask(ctypes.Structure):
    _fields_ = (
        *((name, c_int64) for name in ("num_requests", "num_levels", "num_rows", "size")),
        ("levels", c_void_p),
        ("worth", _CWorth),
        *((name, c_void_p) for name in ("num_tokens", "num_drafts")),
        ("columns", _DraftColumns),
        *((name, c_void_p) for name in ("token_ids", "parents")),
        *((name, c_void_p) for name in ("is_drawn", "probs")),
        ("stops", _CStops),
    )


_RANKED, _DRAWN, _RANKED_WITH_NOISE = range(3)
_SIDE_SHARES = np.array(side_shares(64), dtype=np.float32)  # a level has no more rows


def _worth(num_shares: int) -> _CWorth:
    return _CWorth(
        draft_ops.RANK0_BASE,
        draft_ops.RANK0_SLOPE,
        draft_ops.OWN_BASE,
        draft_ops.OWN_SLOPE,
        draft_ops.SIDE_WEIGHT,
        num_shares,
        _SIDE_SHARES.ctypes.data,
    )


_NO_SHARES, _NO_STOPS = _worth(0), _CStops()


class NativeGrowth:
    """Whole drafts: of a decoder in one call, of other networks level by level."""

    def __init__(self, library: Library) -> None:
        task, handle, address = POINTER(CDraftTask), c_void_p, c_void_p
        function, unread = library.function, POINTER(CUnreadTexts)
        of_draft = [handle, task, unread, POINTER(CDraftShares)]
        self._draft = function("decoder_draft", of_draft, c_int64, releases_gil=True)
        self._create = function("growth_create", [task], handle)
        of_level = [handle, address, address]
        self._extend = function("growth_extend", of_level, c_int64, releases_gil=True)
        self._finish = function("growth_finish", [handle])
        self._destroy = function("growth_destroy", [handle])
        self._newest: _KeptColumns | None = None

    def draft(
        self,
        decoder: int,
        unread: UnreadTexts,
        growth: Growth,
        dtype: torch.dtype,
        link: RankLink | None = None,
    ) -> ModelDrafts:
        """Draft in one call: the operation `DecoderPass.draft`.

        Args:
            decoder: address of the `Decoder`.
            dtype: of its states.
            link: to the other ranks of a decoder that is spread.

        Raises:
            RanksError: another rank did not answer.
        """
        task, texts = self.task(growth), UnreadArrays(unread, dtype)
        shares = None if link is None else shares_of(growth)
        is_valid = self._draft(
            decoder, ctypes.byref(task.native), ctypes.byref(texts.native), shares
        )
        if link is not None:
            link.settle()
        assert is_valid, "a token or a position is out of its table"
        return task.drafts()

    def grow(
        self,
        levels: TreeLevels,
        growth: Growth,
        by_levels: Callable[[TreeLevels, Growth], ModelDrafts],
    ) -> ModelDrafts:
        task, num_requests = self.task(growth), len(growth.num_tokens_B)
        handle = self._create(ctypes.byref(task.native))
        try:
            first_row, frontier = 0, None
            for depth, width in enumerate(growth.shape.levels, start=1):
                logits = levels.next_logits(frontier) if frontier else levels.first_logits()
                assert logits.dtype is torch.float32, f"expected float32, got {logits.dtype}"
                logits = logits.contiguous()
                rows_3BF = torch.empty(3, num_requests, width, dtype=torch.int64)
                if self._extend(handle, logits.data_ptr(), rows_3BF.data_ptr()) == 0:
                    break
                frontier = Frontier(*rows_3BF.unbind(), depth=depth, first_row=first_row)
                first_row += width
            self._finish(handle)
        finally:
            self._destroy(handle)
        return task.drafts()

    def task(self, growth: Growth) -> "_Drafting":
        """The task of a call. Columns of the newest batch are kept: it is mostly the next one."""
        newest = self._newest
        if newest is None or not newest.hold_for(growth):
            newest = self._newest = _KeptColumns(growth)
        return _Drafting(growth, newest)


class _Drafting:
    """The task of a call, and the tensors that it names; the next one has the same memory."""

    def __init__(self, growth: Growth, kept: "_KeptColumns") -> None:
        """Raises ValueError if the vocabulary cannot fill a level."""
        sampling, shape, task = growth.sampling, growth.shape, kept.task
        num_requests: int = task.num_requests
        shape_BK = num_requests, shape.num_rows
        self._growth, self._kept = growth, kept
        self._draws = growth.samples and sampling.any_draws
        self._token_ids_BK = torch.empty(shape_BK, dtype=torch.int64)
        self._parents_BK = torch.empty(shape_BK, dtype=torch.int64)
        self._is_drawn_BK = torch.empty(shape_BK, dtype=torch.bool)
        self._probs_BKV = torch.empty(*shape_BK, sampling.vocab_size) if self._draws else None
        self._margins_BL: Tensor | None = None
        self._num_drafts_B = growth.num_drafts_B
        self.native = task
        task.num_levels, task.num_rows = shape.depth, shape.num_rows
        self._levels_L, task.levels = _levels(shape.levels, sampling.vocab_size)
        task.num_tokens = address_of(growth.num_tokens_B, torch.int64)
        task.num_drafts = address_of(growth.num_drafts_B, torch.int64)
        task.token_ids = self._token_ids_BK.data_ptr()
        task.parents = self._parents_BK.data_ptr()
        task.is_drawn = self._is_drawn_BK.data_ptr()
        task.probs = None if self._probs_BKV is None else self._probs_BKV.data_ptr()
        task.stops = _NO_STOPS
        if growth.stops is not None:
            self._margins_BL = torch.empty(num_requests, shape.depth)
            self._num_drafts_B = torch.empty(num_requests, dtype=torch.int64)
            assert growth.stops.weights_BL.shape == (len(growth.num_drafts_G), shape.depth)
            stops = kept.stops(growth.stops)
            stops.margins = self._margins_BL.data_ptr()
            stops.num_drafted = self._num_drafts_B.data_ptr()
            task.stops = stops

    def drafts(self) -> ModelDrafts:
        """The results, once the call is over."""
        growth, draws = self._growth, self._draws
        return ModelDrafts(
            self._token_ids_BK,
            self._parents_BK,
            num_drafts_B=self._num_drafts_B,
            probs_BKV=self._probs_BKV,
            is_sampled_BK=self._is_drawn_BK if draws else None,
            is_chain=growth.shape.is_chain,
            all_sampled=draws and growth.sampling.all_draw,
            margins_BL=self._margins_BL,
        )


class _KeptColumns:
    """The columns by which the requests of one batch choose, and their tensors.

    Attributes:
        task: has all that stays the same from draft to draft.
    """

    def __init__(self, growth: Growth) -> None:
        sampling = growth.sampling
        self._sampling, self._samples = sampling, growth.samples
        at = self._addresses = Addresses()
        columns = _DraftColumns(
            at(sampling.seeds_B, torch.int64),
            at(_kinds(growth), torch.int64),
            at(sampling.is_greedy_B, torch.bool),
            at(sampling.temperature_B, torch.float32),
            at(sampling.log_min_p_B, torch.float32),
            at(sampling.top_k_B, torch.int64),
            at(sampling.top_p_B, torch.float32),
            None if sampling.allowed is None else at(_allowed_BV(growth), torch.bool),
            None if sampling.bias is None else at(_bias_BV(growth), torch.float32),
        )
        self.task = CDraftTask(
            num_requests=growth.num_tokens_B.shape[0],
            size=sampling.vocab_size,
            worth=_NO_SHARES,  # each level sets the number of shares
            columns=columns,
        )
        self._rules: tuple[StopRules, _CStops] | None = None

    def stops(self, rules: StopRules) -> _CStops:
        """Without the addresses of results."""
        if self._rules is None or self._rules[0] is not rules:
            self._rules = rules, _stops(rules)
        return self._rules[1]

    def hold_for(self, growth: Growth) -> bool:
        return self._sampling is growth.sampling and self._samples == growth.samples


def _stops(rules: StopRules) -> _CStops:
    """Without the addresses of results; the rules must live as long."""
    return _CStops(
        *(address_of(one, torch.float64) for one in (rules.weights_BL, rules.biases_BL)),
        address_of(rules.price_B, torch.float64),
        address_of(rules.has_rule_B, torch.bool),
        int(rules.room_1),
    )


@functools.lru_cache(maxsize=256)
def _levels(levels: tuple[int, ...], size: int) -> tuple[np.ndarray, int]:
    """int64 [L], checked for a vocabulary of this size, and its address."""
    for num_nodes, num_rows in zip((1, *levels), levels, strict=False):
        _check_level(num_nodes, num_rows, size)
    levels_L = np.array(levels, dtype=np.int64)
    return levels_L, array_address(levels_L)


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


def _allowed_BV(growth: Growth) -> Tensor:
    """bool."""
    sets, size = growth.sampling.allowed, growth.sampling.vocab_size
    assert sets is not None
    is_in_set_BV = torch.zeros(len(sets.ids_BE), size, dtype=torch.bool)
    return is_in_set_BV.scatter_(1, sets.ids_BE, True) | ~sets.is_set_B[:, None]


def _bias_BV(growth: Growth) -> Tensor:
    values, size = growth.sampling.bias, growth.sampling.vocab_size
    assert values is not None
    return torch.zeros(len(values.ids_BE), size).scatter_add_(1, values.ids_BE, values.values_BE)
