"""What the grammars of a step's requests allow behind each row that is verified.

Masks are made on the host. The host knows its own drafts; those of the network are on the device. A
step waits for them only if one of the requests that the network drafts for has a grammar. It waits
for the drafting, not for the target's pass, which the device begins meanwhile.

Dimension key: B requests that sample, N drafts of one, R rows whose logits are needed, W int32
words of a mask of one bit per token.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.plan import Work
from outdraft.kernels.data.drafts import DraftBatch


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


def copy_of_drafted(works: Sequence[Work], drafts: DraftBatch) -> DraftedCopy | None:
    """Start to copy the network's drafts to the host, if a grammar needs them; does not wait."""
    if not any(_is_of_model(work) and work.request.grammar is not None for work in works):
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
    """What the grammars of a step allow.

    Attributes:
        masks_RW: int32, all ones in the rows of requests without a grammar.
        is_end_BN: bool; nothing may be emitted behind this draft, as its row has no mask. None:
            there is no such draft.
    """

    masks_RW: Tensor
    is_end_BN: Tensor | None


def grammar_masks(
    works: Sequence[Work],
    drafted: DraftedCopy | None,
    drafts: DraftBatch,
    vocab_size: int,
) -> GrammarMasks | None:
    """None if no request has a grammar."""
    if all(work.request.grammar is None for work in works):
        return None
    drafts_2BN = drafted.wait() if drafted is not None else None
    num_rows = sum(1 + work.num_drafts for work in works)
    masks_RW = np.full((num_rows, -(-vocab_size // 32)), -1, dtype=np.int32)
    is_end_BN = np.zeros((len(works), drafts.width), dtype=np.int32)
    start = 0
    for place, work in enumerate(works):
        end = start + 1 + work.num_drafts
        if work.request.grammar is not None:
            token_ids, parents = _draft(work, place, drafts_2BN)
            own_RW = masks_RW[start : start + 1 + len(token_ids)]
            ends = work.request.grammar.fill_masks(token_ids, parents, own_RW)
            is_end_BN[place, [row - 1 for row in ends]] = 1
        start = end
    arrays = [masks_RW, is_end_BN] if is_end_BN.any() else [masks_RW]
    masks, *ends_BN = to_device(arrays, drafts.device)
    return GrammarMasks(masks, ends_BN[0].bool() if ends_BN else None)


def _draft(
    work: Work, place: int, drafts_2BN: np.ndarray | None
) -> tuple[Sequence[int], Sequence[int]]:
    """Ids and parents of what is verified for a work; what a live rule left out has the id -1."""
    if work.drafts is None:
        return (), ()
    if not _is_of_model(work):
        return work.drafts.draft.token_ids, work.drafts.draft.parents
    assert drafts_2BN is not None
    token_ids, parents = drafts_2BN[:, place, : work.num_drafts]
    num_drafts = int((token_ids >= 0).sum())
    return token_ids[:num_drafts].tolist(), parents[:num_drafts].tolist()


def _is_of_model(work: Work) -> bool:
    return work.drafts is not None and work.drafts.num_model_drafts > 0
