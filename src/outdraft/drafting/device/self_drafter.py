"""The target drafts for itself: its own weights, or a copy in fewer bits, over its own cache.

There is nothing to catch up with: the target has written keys and values of all tokens but the
newest one. The drafter writes those of the newest token and of its drafts after them, where the
target writes its own before it reads any of them (docs/design/0016).

It may read a few blocks of each text only: the first block (attention sinks, Xiao et al. 2023,
arXiv 2309.17453), the newest blocks, and those to which the newest row of the target's last full
pass gave most of its attention, in a few of its layers. That follows from finished steps only.

Dimension key: S state rows, K layers, D hidden, W works of a step, B requests that draft, H heads,
C head size, P blocks of the longest text, L tokens of a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.draft import DraftSource
from outdraft.core.errors import ConfigError
from outdraft.drafting.device.asks import DraftModelAsk, TargetStates
from outdraft.drafting.device.network_drafter import DraftNetwork, NetworkDrafter
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.draft_ops import Growth
from outdraft.kv.cache import KVCache
from outdraft.models.base import LanguageModel
from outdraft.models.decoder.causal_lm import CausalLM

# A drafter over few blocks needs the newest state of a text, to find those it attended to.
SPARSE_WINDOW = 1

LEAST_BLOCKS = 4  # of a budget
RECENT_SHARE = 4  # 1 block of 4 is for the newest tokens
LAYERS_SHARE, MOST_LAYERS = 8, 4  # 1 layer of 8 is looked at, and at most 4 layers


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """The number of blocks of a text that are read.

    Attributes:
        num_blocks: in all, at least LEAST_BLOCKS.
        block_size: tokens.
    """

    num_blocks: int
    block_size: int

    @classmethod
    def of_tokens(cls, kv_budget: int, block_size: int) -> "BlockBudget":
        """The whole blocks that fit into kv_budget tokens.

        Raises:
            ConfigError: they are fewer than LEAST_BLOCKS.
        """
        if kv_budget < LEAST_BLOCKS * block_size:
            raise ConfigError(
                f"kv_budget must be at least {LEAST_BLOCKS} blocks of {block_size} tokens, so "
                f"{LEAST_BLOCKS * block_size}, got {kv_budget}"
            )
        return cls(kv_budget // block_size, block_size)

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_recent(self) -> int:
        """The newest ones of these, the one of the newest token included."""
        return max(2, self.num_blocks // RECENT_SHARE)

    def first_recent(self, num_tokens: int) -> int:
        """The place, in the table of a text, of the first of its newest blocks."""
        return max(0, (num_tokens - 1) // self.block_size + 1 - self.num_recent)

    def places(self, num_tokens: int, mass_P: np.ndarray) -> list[int]:
        """Places of the blocks before the newest ones, ascending; all that there are if the budget
        has room for them.

        `mass_P`: the attention that each block got.
        """
        first_recent = self.first_recent(num_tokens)
        num_others = self.num_blocks - self.num_recent
        if first_recent <= num_others:
            return list(range(first_recent))
        newest_first = mass_P[1:first_recent][::-1]  # of equal blocks, the newer ones
        order = np.argsort(-newest_first, kind="stable")[: num_others - 1]
        return [0, *sorted((first_recent - 1 - order).tolist())]


def attention_layers(num_layers: int) -> tuple[int, ...]:
    """The layers whose attention is looked at: evenly spread."""
    number = max(1, min(MOST_LAYERS, num_layers // LAYERS_SHARE))
    return tuple(num_layers * (2 * place + 1) // (2 * number) for place in range(number))


class AttendedBlocks:
    """The blocks that the newest full pass attended to, of the text in each state row.

    A pass keeps only the stream of its newest row. When a request drafts, its attention to the
    cached keys is computed and summed. So a step without drafts computes nothing here.

    Attributes:
        layers: their attention is summed; the streams that enter them are tapped.
    """

    def __init__(
        self, target: CausalLM, cache: KVCache, budget: BlockBudget, num_state_rows: int
    ) -> None:
        self.layers = attention_layers(target.config.num_layers)
        self._target, self._cache, self._budget = target, cache, budget
        # The last row takes writes that must go nowhere.
        self._streams_SKD = torch.zeros(
            num_state_rows + 1,
            len(self.layers),
            target.config.hidden_size,
            dtype=target.dtype,
            device=target.device,
        )

    def keep(self, states: TargetStates) -> None:
        """Keep the streams of each text's newest row."""
        places_W = states.last_places_W
        rows_W = torch.where(places_W < 0, len(self._streams_SKD) - 1, places_W)
        streams_WKD = states.tapped_TKD.index_select(0, states.last_rows_W)
        self._streams_SKD.index_copy_(0, rows_W, streams_WKD)

    def narrowed(self, asks: Sequence[DraftModelAsk]) -> list[DraftModelAsk]:
        """Copy the asks, with tables of only the blocks that they read.

        The choice of blocks follows from finished steps. The host waits for their masses.
        """
        size, budget = self._budget.block_size, self._budget
        long = [ask for ask in asks if ask.num_tokens > budget.num_tokens]
        if not long:
            return list(asks)
        masses = iter(self._masses(long).cpu().numpy())
        narrowed: list[DraftModelAsk] = []
        for ask in asks:
            if ask.num_tokens > budget.num_tokens:
                places = budget.places(ask.num_tokens, next(masses))
                first_recent = budget.first_recent(ask.num_tokens)
                blocks = [ask.block_ids[place] for place in places]
                blocks += ask.block_ids[first_recent:]
                num_skipped = (first_recent - len(places)) * size
                ask = replace(ask, block_ids=blocks, num_skipped=num_skipped)
            narrowed.append(ask)
        return narrowed

    def _masses(self, asks: Sequence[DraftModelAsk]) -> Tensor:
        """float32 [B, P]: attention of the newest computed row of each text to its blocks."""
        device = self._streams_SKD.device
        num_blocks = [-(-(ask.num_tokens - 1) // self._budget.block_size) for ask in asks]
        table_BP = np.zeros((len(asks), max(num_blocks)), dtype=np.int32)
        for row_P, ask, count in zip(table_BP, asks, num_blocks, strict=True):
            row_P[:count] = ask.block_ids[:count]
        # All tokens but the newest one are computed.
        computed_B = np.array([ask.num_tokens - 1 for ask in asks])
        rows_B = np.array([ask.state_row for ask in asks])
        table_BP, computed_B, rows_B = to_device([table_BP, computed_B, rows_B], device)
        streams_BKD = self._streams_SKD.index_select(0, rows_B)
        mass_BP = torch.zeros(table_BP.shape, device=device)
        for place, layer in enumerate(self.layers):
            stream_BD = streams_BKD[:, place].contiguous()
            q_BHC = self._target.decoder.queries(layer, stream_BD, computed_B - 1)
            mass_BP += self._target.kernels.block_mass(
                q_BHC,
                self._cache.layers[layer].k_PSGC,
                table_BP,
                computed_B,
                q_BHC.shape[2] ** -0.5,
            )
        return mass_BP


class SelfDrafter(NetworkDrafter):
    """Drafts with the target's weights or with fewer bits of them, over all of a text's blocks or
    over those that the target attended to most."""

    def __init__(
        self,
        model: LanguageModel,
        cache: KVCache,
        max_rows: int,
        attended: AttendedBlocks | None = None,
    ) -> None:
        """
        Args:
            model: the target, or a copy of it.
            cache: the target's.
            max_rows: of one pass.
            attended: None: it reads all blocks.
        """
        super().__init__(DraftNetwork(model), cache, max_rows, DraftSource.SELF)
        # What it wrote after the text is the target's by the end of the step.
        self.max_kept = 0
        self._attended = attended
        if attended is not None:
            self.state_window, self.taps, self.keep = SPARSE_WINDOW, attended.layers, attended.keep

    def draft(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, growth: Growth
    ) -> DraftBatch:
        own = [replace(ask, num_computed=ask.num_tokens - 1) for ask in asks]
        if self._attended is not None:
            own = self._attended.narrowed(own)
        return super().draft(own, token_ids_SL, growth)
