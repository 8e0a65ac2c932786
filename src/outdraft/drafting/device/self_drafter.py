"""The target drafts for itself: its own weights, or a copy in fewer bits, over its own cache.

There is nothing to catch up with: the target has written keys and values of all tokens but the
newest one. The drafter writes those of the newest token and of its drafts after them, where the
target writes its own before it reads any of them (docs/design/0016). It may read a few blocks of
each text only.

Dimension key: S state rows, L tokens of a text.
"""

from collections.abc import Sequence

from msgspec.structs import replace
from torch import Tensor

from outdraft.core.draft import DraftSource
from outdraft.core.plan import ModelDrafting
from outdraft.drafting.device.asks import DraftModelAsk, TargetStates
from outdraft.drafting.device.attended_blocks import AttendedBlocks
from outdraft.drafting.device.draft_network import DraftNetwork
from outdraft.drafting.device.network_drafter import NetworkDrafter
from outdraft.kernels.draft_ops import Growth, ModelDrafts
from outdraft.kv.cache import KVCache
from outdraft.models.base import LanguageModel

# It needs the newest state of a text, to find the blocks that this attended to.
SPARSE_WINDOW = 1


class SelfDrafter:
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
        network = DraftNetwork(model)
        self._drafter = NetworkDrafter(network, cache, max_rows, DraftSource.SELF)
        self._attended = attended
        self.state_window = SPARSE_WINDOW if attended is not None else 0
        self.taps = attended.layers if attended is not None else ()
        self.reads_all_hidden = False
        self.max_drafts, self.max_passes = self._drafter.max_drafts, self._drafter.max_passes
        # What it wrote after the text is the target's by the end of the step.
        self.drafting = ModelDrafting(DraftSource.SELF, max_kept=0)

    def keep(self, states: TargetStates) -> None:
        assert self._attended is not None, "it reads no states"
        self._attended.keep(states)

    def draft(
        self, asks: Sequence[DraftModelAsk], token_ids_SL: Tensor, growth: Growth
    ) -> ModelDrafts:
        own = [replace(ask, num_computed=ask.num_tokens - 1) for ask in asks]
        if self._attended is not None:
            own = self._attended.narrowed(own)
        return self._drafter.draft(own, token_ids_SL, growth)
