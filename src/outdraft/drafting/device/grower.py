"""Grows drafts level by level, for a batch of any mixture of requests.

A drafter gives the logits after the newest token of each text, and then after each node of a
level. The grower chooses the rows of the next level. A chain is the tree whose levels have one row
each. Nothing comes back to the host: it knows beforehand how many rows each level has, but not
which tokens they hold and which rows they continue. With live rules a request may leave the last
levels of its chain out (`live_stop`).

Requests of temperature 0 get the likeliest tokens (`RankedTrees`), others get draws without
replacement (`DrawnTrees`). Requests that share their noise get the tokens that the target would
most likely choose with that noise if it had the drafter's logits. These are matched with the
target's own choices, so the output does not depend on them.

Dimension key: B requests, G those of all ranks that share the drafter, E nodes of the level above
(1: the root), F rows of the newest level, K rows of a tree, V vocabulary.
"""

from dataclasses import replace

import torch
from torch import Tensor

from outdraft.distributed.group import RequestShares
from outdraft.drafting.device.live_stop import LiveStops
from outdraft.drafting.device.trees import DrawnTrees, RankedTrees
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.noise import NoiseKeys, Purpose
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.draft_ops import Frontier, Growth, TellsOdds, TreeLevels
from outdraft.kernels.ops import Kernels
from outdraft.sampling.processors import process_drafts


class KnownLevels:
    """Logits that depend on no draft: they are known when drafting begins."""

    def __init__(self, logits_BKV: Tensor) -> None:
        """`logits_BKV`: after all nodes of each level."""
        self._logits_BKV = logits_BKV

    def first_logits(self) -> Tensor:
        return self._logits_BKV[:, 0]

    def next_logits(self, frontier: Frontier) -> Tensor:
        width = frontier.token_ids_BF.shape[1]
        return self._logits_BKV[:, frontier.depth, None].expand(-1, width, -1)


def compiled_grow(levels: TreeLevels, growth: Growth) -> DraftBatch:
    """Grow by the table's operation where that can make these drafts, else by `grow`.

    The operation's rules look at margins only. It ends when this rank's requests have their drafts,
    but ranks that share the levels must all ask for each level, and count the rows of all.
    """
    has_own_odds = growth.stops is not None and isinstance(levels, TellsOdds)
    if growth.shares.group.size > 1 or has_own_odds or not growth.sampling.num_requests:
        return grow(levels, growth)
    return growth.kernels.grow(levels, growth, grow)


def grow(levels: TreeLevels, growth: Growth) -> DraftBatch:
    """One tree for every request.

    Raises:
        ValueError: the vocabulary cannot fill a level.
    """
    sampling, shape = growth.sampling, growth.shape
    draws = growth.samples and sampling.any_draws
    drawn = DrawnTrees(growth) if draws else None
    ranked = None if draws and sampling.all_draw else RankedTrees(shape)
    stops = None
    if growth.stops is not None:
        stops = LiveStops(growth.num_drafts_G, growth.stops, growth.shares)
    draws_B1 = sampling.draws_B[:, None]
    logits_BEV, frontier = levels.first_logits()[:, None], None
    for depth in range(shape.depth):
        if frontier is not None:
            logits_BEV = levels.next_logits(frontier)
        logits_BEV = _processed(growth.kernels, logits_BEV, sampling)
        if stops is not None:
            odds_B = levels.odds_B() if isinstance(levels, TellsOdds) else None
            stops.look(logits_BEV[:, 0], odds_B)
        drawn_rows = drawn and drawn.extend(logits_BEV)
        ranked_rows = ranked and ranked.extend(_with_shared_noise(logits_BEV, growth, depth))
        rows = drawn_rows or ranked_rows
        if drawn_rows and ranked_rows:
            pairs = zip(drawn_rows, ranked_rows, strict=True)
            rows = tuple(torch.where(draws_B1, *pair) for pair in pairs)
        assert rows is not None
        frontier = _frontier(frontier, *rows)
        if stops is not None and stops.have_all_ended:
            break
    return _finished(growth, drawn and drawn.finish(), ranked and ranked.finish(), stops)


def frontier_of_all(frontier: Frontier, shares: RequestShares) -> Frontier:
    """The level of all G requests, from this rank's part of it."""
    if shares.group.size == 1:
        return frontier
    columns = frontier.token_ids_BF, frontier.origins_BF, frontier.ancestors_BF
    rows_3GF = shares.join(torch.stack(columns, dim=1)).transpose(0, 1).contiguous()
    return Frontier(*rows_3GF.unbind(), depth=frontier.depth, first_row=frontier.first_row)


def _processed(kernels: Kernels, logits_BFV: Tensor, sampling: SamplingBatch) -> Tensor:
    """[B, F, V]: as the drafts of each request are chosen."""
    if sampling.is_plain_greedy:
        return logits_BFV
    num_requests, width = logits_BFV.shape[:2]
    request_R = torch.arange(num_requests, device=logits_BFV.device).repeat_interleave(width)
    rows_RV = process_drafts(kernels, logits_BFV.flatten(0, 1), request_R, sampling)
    return rows_RV.view(logits_BFV.shape)


def _with_shared_noise(logits_BEV: Tensor, growth: Growth, depth: int) -> Tensor:
    """Logits plus the noise of the target's choice at this depth, the same after all nodes, where
    a request shares its noise."""
    sampling = growth.sampling
    if not (growth.samples and sampling.any_shares_noise):
        return logits_BEV
    keys = NoiseKeys.of(sampling.seeds_B, growth.num_tokens_B + depth, Purpose.SAMPLE)
    noise_BV = growth.kernels.gumbel(keys, logits_BEV.shape[2])
    shares_B11 = sampling.shares_noise_B[:, None, None]
    return torch.where(shares_B11, logits_BEV + noise_BV[:, None], logits_BEV)


def _frontier(above: Frontier | None, token_ids_BF: Tensor, origins_BF: Tensor) -> Frontier:
    width = origins_BF.shape[1]
    first_row = 0 if above is None else above.first_row + above.token_ids_BF.shape[1]
    places_F = torch.arange(first_row, first_row + width, device=origins_BF.device)
    own_BF = (1 << places_F).expand_as(origins_BF)
    if above is None:
        return Frontier(token_ids_BF, origins_BF, own_BF, 1, 0)
    ancestors_BF = above.ancestors_BF
    if ancestors_BF.shape[1] > 1:
        ancestors_BF = ancestors_BF.gather(1, origins_BF)
    ancestors_BF = own_BF | ancestors_BF
    depth = above.depth + 1
    return Frontier(token_ids_BF, origins_BF, ancestors_BF, depth, first_row)


def _finished(
    growth: Growth,
    drawn: DraftBatch | None,
    ranked: tuple[Tensor, Tensor] | None,
    stops: LiveStops | None,
) -> DraftBatch:
    """The drafts of both kinds of requests, as long as each may be."""
    drafts = drawn
    if ranked is not None:
        token_ids_BN, parents_BN = ranked
        is_chain = growth.shape.is_chain
        drafts = DraftBatch(
            token_ids_BN,
            parents_BN,
            growth.num_drafts_B,
            is_chain=is_chain,
            sampled_trees=not is_chain,
        )
        if drawn is not None and drawn.is_sampled_BN is not None:
            draws_B1 = growth.sampling.draws_B[:, None]
            drafts = replace(
                drawn,
                token_ids_BN=torch.where(draws_B1, drawn.token_ids_BN, token_ids_BN),
                parents_BN=torch.where(draws_B1, drawn.parents_BN, parents_BN),
                is_sampled_BN=drawn.is_sampled_BN & draws_B1,
                all_sampled=False,
            )
    assert drafts is not None
    if stops is not None:
        num_drafts_B, margins_BL = stops.num_drafts_B, stops.margins_BL()
        drafts = replace(drafts, num_drafts_B=num_drafts_B, margins_BL=margins_BL)
    elif growth.fewest == growth.shape.num_rows:
        return drafts
    places_K = torch.arange(drafts.token_ids_BN.shape[1], device=drafts.token_ids_BN.device)
    is_row_BK = places_K < drafts.num_drafts_B[:, None]
    return replace(drafts, token_ids_BN=torch.where(is_row_BK, drafts.token_ids_BN, -1))
