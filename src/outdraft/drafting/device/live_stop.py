"""Live rules: they end chains early, level by level.

Each level's margin is known before its token is drawn, and everything else in a rule is older than
the draft. So the draft ends at a stopping time, and any rule of verification stays exact (see
docs/design/0012). What was decided is never taken back. The probability of the token that was drawn
would be no such signal.

Dimension key: B requests that draft, G those of all ranks that share the drafter, L levels, V
vocabulary.
"""

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.draft import MAX_MARGIN
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.drafting.device.asks import DraftModelAsk
from outdraft.kernels.draft_ops import StopRules


def stop_rules(
    asks: Sequence[DraftModelAsk], num_host_rows: int, device: torch.device
) -> StopRules | None:
    """The rules of a batch, in one copy; None: no request has one.

    Args:
        num_host_rows: rows of the step that the host drafted.
    """
    stops = [ask.stop for ask in asks]
    if not any(stops):
        return None
    depth = max([ask.num_drafts for ask in asks])
    scores_2BL = np.zeros((2, len(asks), depth))
    price_B, has_rule_B = np.zeros(len(asks)), np.zeros(len(asks), dtype=np.bool_)
    for row, ask in enumerate(asks):
        if ask.stop is not None:
            rule = ask.stop.weights, ask.stop.biases
            for scores_L, numbers in zip(scores_2BL[:, row], rule, strict=True):
                scores_L[: ask.num_drafts] = numbers[: ask.num_drafts]
            price_B[row], has_rule_B[row] = ask.stop.price, True
    row_cap = min(stop.row_cap for stop in stops if stop is not None)
    room_1 = np.array([row_cap - num_host_rows])
    return StopRules(*to_device([*scores_2BL, price_B, has_rule_B, room_1], device))


def with_part_of_cap(
    ask: DraftModelAsk, num_host_rows: int, planned: Sequence[int], group: int
) -> DraftModelAsk:
    """An ask of a group of requests that drafts on its own, with the group's part of the step's cap
    on rows.

    Args:
        planned: rows of each group.
    """
    if ask.stop is None:
        return ask
    row_cap = caps_of_groups(ask.stop.row_cap, num_host_rows, planned)[group]
    return replace(ask, stop=replace(ask.stop, row_cap=row_cap))


def caps_of_groups(row_cap: int, num_host_rows: int, planned: Sequence[int]) -> list[int]:
    """A step's cap on rows of drafts, for each group of requests that draft together, which counts
    the host's rows and its own.

    No group waits for what another one drafts, so each has a part of the rows that the host leaves,
    in proportion to what it was planned to draft. It follows from the plan, as all of a rule must.

    Args:
        planned: rows of each group.
    """
    total, left = sum(planned), max(0, row_cap - num_host_rows)
    if left >= total:
        return [row_cap] * len(planned)
    ends = [0, *(left * before // total for before in itertools.accumulate(planned))]
    return [num_host_rows + end - start for start, end in itertools.pairwise(ends)]


def margins_B(logits_BV: Tensor) -> Tensor:
    """float32 [B]: the distance between the two largest logits of each row, at most MAX_MARGIN.

    NaN are passed over. Where two are infinite it is 0.
    """
    least = -torch.inf
    numbers_BV = torch.nan_to_num(logits_BV, nan=least, posinf=torch.inf, neginf=least)
    best_B2 = torch.nn.functional.pad(numbers_BV, (0, 1), value=least).topk(2, dim=1).values
    distance_B = (best_B2[:, 0] - best_B2[:, 1]).float()
    return distance_B.nan_to_num(nan=0.0).clamp(max=MAX_MARGIN)


def host_sees(device: torch.device) -> bool:
    """The host can read tensors of the device without waiting."""
    return device.type == "cpu"


class LiveStops:
    """Says, level by level, which requests go on.

    A rule looks at the rows of all requests, so each rank decides for all.

    Attributes:
        num_drafts_G: int64; number of drafts of each request so far.
    """

    def __init__(
        self, num_wanted_G: Tensor, rules: StopRules, shares: RequestShares = ALL_HERE
    ) -> None:
        """`num_wanted_G`: int64, most drafts of each request."""
        self._rules, self._num_wanted_G, self._shares = rules, num_wanted_G, shares
        self._is_drafting_G = torch.ones_like(rules.has_rule_B)
        self._survival_G = torch.ones_like(rules.price_B)
        self.num_drafts_G = torch.zeros_like(num_wanted_G)
        self._margins: list[Tensor] = []

    def look(self, logits_BV: Tensor, odds_B: Tensor | None = None) -> None:
        """Decide about the next level, before its tokens are chosen from these logits.

        `odds_B`: a drafter's own log-odds that they are accepted; None: it gives none.
        """
        rules, level = self._rules, len(self._margins)
        self._is_drafting_G = self._is_drafting_G & (level < self._num_wanted_G)
        looks_G = self._is_drafting_G & rules.has_rule_B
        if odds_B is None:
            own_B = margins_B(logits_BV)
        else:  # even odds are in the middle; weights and biases make of them what is observed
            own_B = (odds_B.float().nan_to_num(nan=0.0) + MAX_MARGIN / 2).clamp(0, MAX_MARGIN)
        margin_G = self._shares.join(own_B)
        self._margins.append(margin_G.masked_fill(~looks_G, torch.nan))
        score_G = rules.weights_BL[:, level] * margin_G + rules.biases_BL[:, level]
        self._survival_G = self._survival_G * score_G.sigmoid()
        survives_G = self._is_drafting_G & ((self._survival_G >= rules.price_B) | ~rules.has_rule_B)
        # While there is room, all that survive have a row: those before a request are as many.
        num_before_G = survives_G.cumsum(0) - survives_G.long()
        num_rows_G = num_before_G + self.num_drafts_G.sum()
        self._is_drafting_G = survives_G & (~rules.has_rule_B | (num_rows_G < rules.room_1))
        self.num_drafts_G = self.num_drafts_G + self._is_drafting_G

    @property
    def have_all_ended(self) -> bool:
        """No request drafts on; False where the host would have to wait to know it."""
        return host_sees(self._is_drafting_G.device) and not bool(self._is_drafting_G.any())

    @property
    def num_drafts_B(self) -> Tensor:
        """int64; of this rank's requests."""
        return self._shares.own(self.num_drafts_G)

    def margins_BL(self) -> Tensor:
        """float32, of this rank's requests and the levels so far."""
        return self._shares.own(torch.stack(self._margins, dim=1))
