"""Messages between runner and scheduler in a step in which outputs keep to grammars.

Masks are made on the host, which knows its own drafts; those of the network are on the device. They
are copied only if one of the requests that the network drafts for has a grammar. A reader of the
copy waits for the drafting, not for the target's pass, which the device begins meanwhile.

Dimension key: B requests that sample, N drafts of one, R rows whose logits are needed, W int32
words of a mask of one bit per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.grammar import AllowedTokens
from outdraft.core.plan import Work
from outdraft.kernels.data.drafts import DraftBatch
from outdraft.kernels.data.logits import RequestPart
from outdraft.runner.state import Slots


@dataclass(frozen=True, slots=True)
class DraftedCopy:
    """Drafts on their way to the host.

    Attributes:
        drafts_2BN: int64, ids and parents, on the host, not to be read before `arrived`.
    """

    drafts_2BN: Tensor
    arrived: torch.cuda.Event | None

    def wait(self) -> np.ndarray:
        """int64 [2, B, N]."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.drafts_2BN.numpy()


def copy_of_drafted(works: Sequence[Work], slots: Slots, drafts: DraftBatch) -> DraftedCopy | None:
    """Start to copy the network's drafts to the host, if a grammar needs them; does not wait."""
    if not any(work.num_model_drafts and slots[work.slot].rules.has_grammar for work in works):
        return None
    drafts_2BN = torch.stack([drafts.token_ids_BN, drafts.parents_BN])
    if drafts.device.type != "cuda":
        return DraftedCopy(drafts_2BN.cpu(), None)
    host_2BN = torch.empty(drafts_2BN.shape, dtype=torch.int64, pin_memory=True)
    host_2BN.copy_(drafts_2BN, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return DraftedCopy(host_2BN, arrived)


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """The tokens that the grammars of a step allow, on the device.

    Attributes:
        masks_RW: int32; see AllowedTokens.
        is_end_BN: bool; nothing may be emitted after this draft. None: there is no such draft.
    """

    masks_RW: Tensor
    is_end_BN: Tensor | None

    def part(self, part: RequestPart) -> "GrammarMasks":
        """The masks of some requests."""
        is_end_BN = None if self.is_end_BN is None else self.is_end_BN[part.requests]
        return GrammarMasks(self.masks_RW[part.rows], is_end_BN)


def masks_of(allowed: AllowedTokens, drafts: DraftBatch) -> GrammarMasks:
    """The masks, sent to the device in one copy."""
    if allowed.ends_2E.shape[1] == 0:
        [masks_RW] = to_device([allowed.masks_RW], drafts.device)
        return GrammarMasks(masks_RW, None)
    is_end_BN = np.zeros(tuple(drafts.token_ids_BN.shape), dtype=np.int32)
    is_end_BN[tuple(allowed.ends_2E)] = 1
    masks_RW, ends_BN = to_device([allowed.masks_RW, is_end_BN], drafts.device)
    return GrammarMasks(masks_RW, ends_BN.bool())
