"""Drafts of any drafter: chains and trees, of the likeliest tokens or drawn ones.

A drafter answers one question: the logits after these rows. Everything else is the same for
small models, EAGLE, mask tokens and heads, and is done here and in `grower`.

Dimension key: B requests that draft, G those of all ranks that share the drafter, S state rows, L
tokens of a text.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Protocol

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.decision import CHAIN, Shape
from outdraft.core.draft import DraftSource, TreeShape
from outdraft.distributed.group import ALL_HERE, RequestShares
from outdraft.drafting.device.asks import DraftModelAsk, TargetStates
from outdraft.drafting.device.live_stop import stop_rules, with_part_of_cap
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.logits import most_logit_rows
from outdraft.kernels.data.sampling import SamplingBatch
from outdraft.kernels.draft_ops import Growth
from outdraft.kernels.ops import Kernels

FEW_UNREAD = 16  # tokens of a text that may be read more than once in a step


class DeviceDrafter(Protocol):
    """Gives logits of drafts after texts, without waiting for anything.

    Attributes:
        source: the source that its drafts count for.
        max_kept: as in DrafterBooks, which relies on it.
        state_window: number of a text's newest tokens whose states of the target it keeps; 0:
            none, and `keep` is not called.
        taps: the layers whose residual streams it reads besides the last hidden state; may be ().
        reads_all_hidden: it reads the last hidden state of every row; else of rows with logits at
            most.
        max_drafts: most tokens after the text that it drafts.
        max_passes: most passes of the network in one step, however much it drafts.
    """

    source: DraftSource
    state_window: int
    max_drafts: int
    max_passes: int

    @property
    def max_kept(self) -> int | None: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    @property
    def reads_all_hidden(self) -> bool: ...

    def keep(self, states: TargetStates) -> None:
        """Keep these states of the target; called at the end of steps whose states are kept. After
        a step without, nothing is drafted for a text before its next states are kept."""
        ...

    def draft(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, growth: Growth
    ) -> DraftBatch:
        """Draft after the texts of this rank's asks: `grow` over the drafter's logits.

        Args:
            token_ids_SL: int64, the texts on the device; [S state rows, L tokens].
        """
        ...


class DeviceProposer:
    """Makes drafts with a drafter: chains, or trees of one shape; never both in one step.

    All requests of a step grow level by level, in the same passes, and a chain takes passes for
    levels that a tree with as many rows has not.

    Attributes:
        shapes: of the drafts, the configured one first.
        max_drafts: most drafts of one request in one step.
        max_chain: most of a chain.
        max_passes: most passes of the network in one step.
    """

    def __init__(
        self, kernels: Kernels, drafter: DeviceDrafter, tree: TreeShape | None, *, samples: bool
    ) -> None:
        """
        Args:
            kernels: for float32 logits, and for the drafter's own if they have more digits.
            tree: None: chains, as long as they are wanted.
            samples: draw drafts from the drafter's distribution instead of taking its best.
        """
        self.drafter = drafter
        self._kernels = kernels
        self._samples = samples
        self.shapes: tuple[Shape, ...] = (CHAIN,)
        self.max_drafts = self.max_chain = drafter.max_drafts
        if tree is not None:
            self.max_drafts = tree.num_rows
            self.max_chain = min(drafter.max_drafts, tree.num_rows)
        if tree is not None and not tree.is_chain:
            self.shapes = (tree.levels, CHAIN)
        self.max_passes = min(drafter.max_passes, self.max_chain)

    def propose(
        self,
        asks: Sequence[DraftModelAsk],
        token_ids_SL: Tensor,
        sampling: SamplingBatch,
        num_host_rows: int = 0,
        shares: RequestShares = ALL_HERE,
    ) -> DraftBatch:
        """Chains or trees of `ask.num_drafts` tokens each; fewer where a live rule ends a chain.

        All asks are for the same levels.

        Args:
            asks: of all ranks that share the drafter; the result has this rank's only.
            token_ids_SL: int64, the texts; [S state rows, L tokens].
            sampling: the parameters of this rank's requests in the same order.
            num_host_rows: rows of the step that the host drafted; live rules count them.
            shares: which of the requests are this rank's.
        """
        groups = self._groups(asks, sampling.vocab_size, token_ids_SL.device, shares)
        if len(groups) == 1:
            return self._proposed(asks, token_ids_SL, sampling, num_host_rows, shares)
        planned = [sum([ask.num_drafts for ask in asks[group]]) for group in groups]
        made: list[DraftBatch] = []
        for number, group in enumerate(groups):
            some = [with_part_of_cap(ask, num_host_rows, planned, number) for ask in asks[group]]
            own = sampling.part(group)
            made.append(self._proposed(some, token_ids_SL, own, num_host_rows, shares))
        return DraftBatch.joined(made)

    def _groups(
        self,
        asks: Sequence[DraftModelAsk],
        vocab_size: int,
        device: torch.device,
        shares: RequestShares,
    ) -> list[slice]:
        """The requests that draft together: with logits of few rows at the same time. Ranks that
        share the network draft for all together."""
        if shares.group.size > 1:
            return [slice(0, len(asks))]
        shape = self._shape(asks)
        num_rows = shape.depth if self.drafter.max_passes == 1 else max(shape.levels)
        size = max(1, most_logit_rows(vocab_size, torch.float32, device) // num_rows)
        return [slice(first, first + size) for first in range(0, len(asks), size)]

    def _proposed(
        self,
        asks: Sequence[DraftModelAsk],
        token_ids_SL: Tensor,
        sampling: SamplingBatch,
        num_host_rows: int,
        shares: RequestShares,
    ) -> DraftBatch:
        """Propose for all asks together, padded with copies to the number that graphs need."""
        num_requests = len(asks)
        number = num_requests
        if shares.group.size == 1:
            number = self._kernels.padded_draft_batch(num_requests)
        copied = _to_copy(asks) if number > num_requests else None
        if copied is not None:
            copy = structs.replace(asks[copied], stop=None)
            asks = [*asks, *[copy] * (number - num_requests)]
            sampling = sampling.with_copies(copied, number)
        wanted, shape = [ask.num_drafts for ask in asks], self._shape(asks)
        stops = stop_rules(asks, num_host_rows, token_ids_SL.device)
        assert stops is None or shape.is_chain, "trees have no live rule"
        counts_2G = np.array([[ask.num_tokens for ask in asks], wanted], dtype=np.int64)
        num_tokens_G, num_drafts_G = to_device([*counts_2G], token_ids_SL.device)
        growth = Growth(
            kernels=self._kernels,
            shape=shape,
            num_tokens_B=shares.own(num_tokens_G),
            num_drafts_G=num_drafts_G,
            fewest=min(wanted),
            sampling=sampling.of_drafts,
            samples=self._samples,
            stops=stops,
            shares=shares,
        )
        drafts = self.drafter.draft(asks, token_ids_SL, growth)
        return drafts if len(asks) == num_requests else _first(drafts, num_requests)

    def _shape(self, asks: Sequence[DraftModelAsk]) -> TreeShape:
        """The fewest first levels with the rows that the asks want."""
        most = max([ask.num_drafts for ask in asks])
        (levels,) = {ask.levels for ask in asks}
        assert most <= (self.max_drafts if levels else self.max_chain), "more drafts than levels"
        return TreeShape(levels).with_room_for(most) if levels else TreeShape.chain(most)


def _to_copy(asks: Sequence[DraftModelAsk]) -> int | None:
    """Index of a request that may be drafted for more than once; None: none.

    All copies write the same to the same slots. With a rule that counts rows, copies would change
    the drafts of other requests. A long text should not be read again.
    """
    if any(ask.stop is not None and ask.stop.may_end for ask in asks):
        return None
    short = [i for i, ask in enumerate(asks) if ask.num_tokens - ask.num_computed <= FEW_UNREAD]
    return short[-1] if short else None


def _first(drafts: DraftBatch, num_requests: int) -> DraftBatch:
    """The drafts of the first num_requests requests."""
    columns = {one.name: getattr(drafts, one.name) for one in fields(drafts)}
    first = {name: one[:num_requests] for name, one in columns.items() if isinstance(one, Tensor)}
    return replace(drafts, **first)
