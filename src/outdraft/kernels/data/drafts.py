"""The drafts of a step on the device, and what was kept of them: packing, paths and rows, without a
loop over requests.

Row 0 of a request is its root, the last committed token; row j + 1 is its j-th draft. Requests
have different numbers of drafts: `[B, N]` tensors are padded, while logits are flat rows, request
after request, root first. Everything here is arithmetic on small integer tensors; nothing waits
for the device.

Dimension key: B requests, N at least as many as the most drafts of any request, N1 = N + 1 rows
with the root, R flat rows, K = N places of a path, L levels of a network, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.draft import Draft
from outdraft.kernels.data.logits import RequestPart


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """Drafted trees, one per request. Places past `num_drafts_B` are padding.

    Attributes:
        token_ids_BN: int64, padded with -1; N may be 0.
        parents_BN: int64; the row that each draft continues: 0 = root, j + 1 = drafted row j.
            A parent precedes its children. Padding may hold anything.
        num_drafts_B: int64.
        probs_BNV: float32; what each sampled draft was really drawn from, given its siblings of
            smaller rows: without replacement, the distribution over all other tokens. Rows of
            drafts that are not sampled may hold anything. None: all are deterministic.
        prob_rows_B: int64; where `probs_BNV` has what belongs to each request, and no more places
            than were drawn; -1: it has nothing. A part of such a batch has its own probabilities.
            None: as it says.
        is_sampled_BN: bool; this draft was drawn from its row of `probs_BNV`. False: it is
            deterministic. Padding may hold anything. None: all are deterministic.
        is_chain: known on the host: every draft is a chain.
        all_sampled: known on the host: every request with drafts has sampled ones. It saves noise
            and changes nothing else; False is always right.
        sampled_trees: known on the host: drafts with sampled rows were laid out as trees, and are
            verified as trees even where one came out as a chain. False: they are chains. Where
            chains have another rule ("token"), the final shape must not decide which rule applies,
            since it may depend on what was drawn.
        margins_BL: float32, of the levels of the network that a live rule looked at, then NaN. A
            rule looks at one level more than it lets a request draft, if it ends it. Here and in
            the tensors of drafts the last levels may be left out if no request has them. None:
            there was no rule.
    """

    token_ids_BN: Tensor
    parents_BN: Tensor
    num_drafts_B: Tensor
    probs_BNV: Tensor | None = None
    is_sampled_BN: Tensor | None = None
    is_chain: bool = False
    all_sampled: bool = False
    sampled_trees: bool = False
    margins_BL: Tensor | None = None
    prob_rows_B: Tensor | None = None

    @classmethod
    def empty(cls, num_requests: int, device: torch.device | str) -> "DraftBatch":
        """No drafts at all: plain decoding."""
        none_B0 = torch.zeros((num_requests, 0), dtype=torch.int64, device=device)
        num_drafts_B = torch.zeros(num_requests, dtype=torch.int64, device=device)
        return cls(none_B0, none_B0, num_drafts_B, is_chain=True)

    @classmethod
    def from_drafts(cls, drafts: Sequence[Draft], device: torch.device | str) -> "DraftBatch":
        """Deterministic drafts of the host, in one upload."""
        num_requests, width = len(drafts), max((len(draft) for draft in drafts), default=0)
        token_ids_BN = np.full((num_requests, width), -1, dtype=np.int64)
        parents_BN = np.zeros((num_requests, width), dtype=np.int64)
        for ids_N, parents_N, draft in zip(token_ids_BN, parents_BN, drafts, strict=True):
            ids_N[: len(draft)] = draft.token_ids
            parents_N[: len(draft)] = draft.parents
        num_drafts_B = np.array([len(draft) for draft in drafts], dtype=np.int64)
        arrays = [token_ids_BN, parents_BN, num_drafts_B]
        is_chain = all(draft.is_chain for draft in drafts)
        return cls(*to_device(arrays, torch.device(device)), is_chain=is_chain)

    @classmethod
    def joined(cls, parts: Sequence["DraftBatch"]) -> "DraftBatch":
        """Join the drafts of a network for all parts of a batch, in order."""

        def columns(name: str, padding: float) -> Tensor | None:
            there: list[Tensor | None] = [getattr(part, name) for part in parts]
            width = max([0 if one is None else one.shape[1] for one in there])
            first = next((one for one in there if one is not None), None)
            if first is None:
                return None
            shape = sum(len(part.num_drafts_B) for part in parts), width, *first.shape[2:]
            whole, row = first.new_full(shape, padding), 0
            for part, one in zip(parts, there, strict=True):
                end = row + len(part.num_drafts_B)
                if one is not None:
                    whole[row:end, : one.shape[1]] = one
                row = end
            return whole

        token_ids_BN, parents_BN = columns("token_ids_BN", -1), columns("parents_BN", 0)
        assert token_ids_BN is not None
        assert parents_BN is not None
        return cls(
            token_ids_BN,
            parents_BN,
            torch.cat([part.num_drafts_B for part in parts]),
            columns("probs_BNV", 0),
            columns("is_sampled_BN", False),
            is_chain=all(part.is_chain for part in parts),
            all_sampled=all(part.all_sampled for part in parts),
            sampled_trees=any(part.sampled_trees for part in parts),
            margins_BL=columns("margins_BL", torch.nan),
        )

    def part(self, part: RequestPart) -> "DraftBatch":
        """The drafts of a part of the requests, without the fields for the host."""
        requests, width, is_sampled_BN = part.requests, part.width, self.is_sampled_BN
        if is_sampled_BN is not None:
            is_sampled_BN = is_sampled_BN[requests, :width].contiguous()
        return DraftBatch(
            self.token_ids_BN[requests, :width].contiguous(),
            self.parents_BN[requests, :width].contiguous(),
            self.num_drafts_B[requests],
            self._part_probs(part),
            is_sampled_BN,
            self.is_chain,
            self.all_sampled,
            self.sampled_trees,
        )

    def widened(self, width: int) -> "DraftBatch":
        """These drafts with `width` places for each request, at least as many as they have, and
        without the probabilities that they were drawn from."""
        is_sampled_BN = self.is_sampled_BN
        return replace(
            self,
            token_ids_BN=widened(self.token_ids_BN, width, -1),
            parents_BN=widened(self.parents_BN, width, 0),
            is_sampled_BN=None if is_sampled_BN is None else widened(is_sampled_BN, width, False),
            probs_BNV=None,
            prob_rows_B=None,
        )

    def _part_probs(self, part: RequestPart) -> Tensor | None:
        probs_MKV, rows_B = self.probs_BNV, self.prob_rows_B
        if probs_MKV is None:
            return None
        if rows_B is None:
            return probs_MKV[part.requests, : part.width]
        probs_BNV = probs_MKV[rows_B[part.requests].clamp_min(0), : part.width]
        return torch.nn.functional.pad(probs_BNV, (0, 0, 0, part.width - probs_BNV.shape[1]))

    @property
    def any_sampled(self) -> bool:
        """Some drafts may have been drawn."""
        return self.is_sampled_BN is not None

    @property
    def num_requests(self) -> int:
        return self.token_ids_BN.shape[0]

    @property
    def width(self) -> int:
        """N."""
        return self.token_ids_BN.shape[1]

    @property
    def device(self) -> torch.device:
        return self.token_ids_BN.device

    @property
    def is_draft_BN(self) -> Tensor:
        """bool; False in the padding."""
        return torch.arange(self.width, device=self.device) < self.num_drafts_B[:, None]

    @property
    def num_rows_B(self) -> Tensor:
        """int64: flat rows of each request."""
        return self.num_drafts_B + 1


class Rule(IntEnum):
    """The rule that verifies drafts with sampled rows of requests that draw; others are matched.

    MATCH matches all of them. TRAVERSAL is traversal verification, which is block verification
    where a tree is a chain. TOKEN, token-level rejection, is a rule of chains: what was laid out as
    trees is verified by TRAVERSAL then.
    """

    MATCH = 0
    TOKEN = 1
    TRAVERSAL = 2


class Verdict(NamedTuple):
    """Tokens that each request keeps. Everything stays on the device.

    Attributes:
        token_ids_BN1: int64; the emitted ids in order, padded with -1: the accepted drafts, then
            one more token (the recovered token after a rejection, the bonus token after none).
        num_emitted_B: int64, at least 1.
        rows_BN: int64; accepted draft rows in order, counted from 0 (the root is not among them),
            padded with -1. A chain's are 0, 1, 2, ...
    """

    token_ids_BN1: Tensor
    num_emitted_B: Tensor
    rows_BN: Tensor

    def widened(self, width: int) -> "Verdict":
        """This verdict with `width` places for the drafts of each request."""
        ids_BN1 = widened(self.token_ids_BN1, width + 1, -1)
        return Verdict(ids_BN1, self.num_emitted_B, widened(self.rows_BN, width, -1))

    def first(self, num_requests: int) -> "Verdict":
        """The verdict about the first requests."""
        return Verdict(*[one[:num_requests] for one in self])

    def copied(self) -> "Verdict":
        """This verdict in new tensors."""
        return Verdict(*map(Tensor.clone, self))

    @classmethod
    def joined(cls, verdicts: Sequence["Verdict"]) -> "Verdict":
        """Join the requests of all, which have as many places for drafts."""
        return cls(*map(torch.cat, zip(*verdicts, strict=True)))

    def cut_behind(self, is_end_BN: Tensor) -> "Verdict":
        """Emit nothing after the first accepted draft of `is_end_BN`: it becomes the last token.

        This is exact if only the tokens up to a draft decide whether it is an end. Then the result
        is a beginning of what was emitted, and that beginning alone says where it stops.
        """
        place_N1 = torch.arange(self.token_ids_BN1.shape[1], device=is_end_BN.device)
        is_accepted_BN = self.rows_BN >= 0
        goes_on_BN = ~(is_accepted_BN & is_end_BN.gather(1, self.rows_BN.clamp(min=0)))
        num_before_B = goes_on_BN.long().cumprod(1).sum(1)  # of all places, if there is no end
        num_emitted_B = torch.minimum(self.num_emitted_B, num_before_B + 1)
        last_B1 = num_emitted_B[:, None] - 1
        return Verdict(
            token_ids_BN1=self.token_ids_BN1.masked_fill(place_N1 > last_B1, -1),
            num_emitted_B=num_emitted_B,
            rows_BN=self.rows_BN.masked_fill(place_N1[:-1] >= last_B1, -1),
        )


def depths_BN1(drafts: DraftBatch) -> Tensor:
    """int64 [B, N1]: distance of every row from the root, which has 0. Padding has no meaning."""
    if drafts.is_chain:
        steps_N1 = torch.arange(drafts.width + 1, device=drafts.device)
        return steps_N1.expand(drafts.num_requests, -1)
    depth_BN1 = torch.ones_like(_up_BN1(drafts))
    depth_BN1[:, 0] = 0
    for up_BN1 in _jumps(drafts):
        depth_BN1 = depth_BN1 + depth_BN1.gather(1, up_BN1)
    return depth_BN1


def ancestors_BN1N(drafts: DraftBatch) -> Tensor:
    """bool [B, N1, N]: draft j is row r itself or one of its ancestors. The root has none."""
    width, device = drafts.width, drafts.device
    seen_N1N = torch.eye(width + 1, dtype=torch.bool, device=device)[:, 1:]
    if drafts.is_chain:
        return seen_N1N.cumsum(0).bool().expand(drafts.num_requests, -1, -1)
    seen_BN1N = seen_N1N.expand(drafts.num_requests, -1, -1)
    for up_BN1 in _jumps(drafts):
        seen_BN1N = seen_BN1N | seen_BN1N.gather(1, up_BN1[:, :, None].expand(-1, -1, width))
    return seen_BN1N


def path_ids_BN1K(drafts: DraftBatch) -> Tensor:
    """int64 [B, N1, K = N]: drafted ids from the root (excluded) to each row (included), then -1.

    The rows of the padding hold no meaningful path.
    """
    width = drafts.width
    seen_BN1N = ancestors_BN1N(drafts)
    place_BN = depths_BN1(drafts)[:, 1:] - 1
    # Tokens that a row does not see go to one more place, which is cut off.
    place_BN1N = torch.where(seen_BN1N, place_BN[:, None, :], width)
    ids_BN1N = drafts.token_ids_BN[:, None, :].expand_as(place_BN1N)
    path_BN1K1 = ids_BN1N.new_full((drafts.num_requests, width + 1, width + 1), -1)
    return path_BN1K1.scatter(2, place_BN1N, ids_BN1N)[:, :, :width]


def row_start_B(drafts: DraftBatch) -> Tensor:
    """int64 [B]: flat row of each request's root."""
    rows_B = drafts.num_rows_B
    return rows_B.cumsum(0) - rows_B


def row_index_BN1(drafts: DraftBatch) -> Tensor:
    """int64 [B, N1]: flat row of each padded row; padding points to the request's root row."""
    place_N1 = torch.arange(drafts.width + 1, device=drafts.device)
    place_BN1 = torch.where(place_N1 <= drafts.num_drafts_B[:, None], place_N1, 0)
    return row_start_B(drafts)[:, None] + place_BN1


def place_R(drafts: DraftBatch, request_R: Tensor) -> Tensor:
    """int64 [R]: which row of its own request each flat row is; padding rows are cut to N."""
    rows_R = torch.arange(request_R.shape[0], device=drafts.device)
    return (rows_R - row_start_B(drafts)[request_R]).clamp_(max=drafts.width)


def _up_BN1(drafts: DraftBatch) -> Tensor:
    """The parent row of every row. A root is its own parent, in the padding too."""
    parents_BN = torch.where(drafts.is_draft_BN, drafts.parents_BN, 0)
    return torch.nn.functional.pad(parents_BN, (1, 0))


def _jumps(drafts: DraftBatch) -> list[Tensor]:
    """Per doubling, the row 1, 2, 4, ... levels above: enough of them to reach any root."""
    up_BN1 = _up_BN1(drafts)
    jumps: list[Tensor] = []
    for _ in range(drafts.width.bit_length()):
        jumps.append(up_BN1)
        up_BN1 = up_BN1.gather(1, up_BN1)
    return jumps


def widened(tensor_BK: Tensor, width: int, padding: float) -> Tensor:
    """Pad the last dimension to that width; a tensor that has it stays."""
    missing = width - tensor_BK.shape[-1]
    return torch.nn.functional.pad(tensor_BK, (0, missing), value=padding) if missing else tensor_BK
