"""State between steps: on the device the tokens of every running request, on the host its slot.

Dimension key: S rows of state (one a running request), L tokens, B requests that sample in this
step, N drafts, W words of a mask of a row's tokens, R rows whose logits are needed.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.plan import NO_GAP, Admission, Work
from outdraft.kv.cache import untouched_zeros


class StepTexts(NamedTuple):
    """The texts of the requests that sample in a step: int64, on the device.

    Attributes:
        rows_B: their rows of the device state.
        num_tokens_B, prompt_lens_B: of each.
    """

    rows_B: Tensor
    num_tokens_B: Tensor
    prompt_lens_B: Tensor

    def of(self, requests: slice) -> "StepTexts":
        """The texts of some of the requests."""
        return StepTexts(*[column_B[requests] for column_B in self])


class RequestSlot:
    """The request that has a row of the device's state.

    Attributes:
        row: the row.
        token_ids: int32; the text at the admission. What came later is on the device only.
        block_ids: int32, the request's blocks; they cover the rows of its newest work.
        gap: the tokens of the text that the drafter lacks.
    """

    __slots__ = ("block_ids", "gap", "num_prompt", "params", "row", "rules", "token_ids")

    def __init__(self, admission: Admission) -> None:
        self.row = admission.slot
        self.rules, self.params = admission.rules, admission.rules.params
        self.token_ids = admission.token_ids
        self.num_prompt = admission.num_prompt
        self.block_ids = array("i")
        self.gap = NO_GAP

    def update(self, work: Work) -> None:
        """Take the news of a work. Each must come once, in the order of the plans."""
        num_known = len(self.block_ids)
        if work.num_kept_blocks != num_known:
            assert work.num_kept_blocks < num_known, "news of blocks were lost"
            del self.block_ids[work.num_kept_blocks :]
        if work.new_block_ids:
            self.block_ids.extend(work.new_block_ids)
        if work.gap is not None:
            self.gap = work.gap

    @property
    def drafter_block_ids(self) -> Sequence[int]:
        """The drafter's blocks."""
        return self.gap.blocks(self.block_ids)


Slots = Mapping[int, RequestSlot]


class DeviceState:
    """token_ids_SL, int64: the text of the request that owns row s; the rest is unspecified.

    A token sampled on the device is written here and read from here; it never has to come back
    from the host.
    """

    def __init__(self, max_num_seqs: int, max_model_len: int, device: torch.device) -> None:
        self.row_len = max_model_len + 1  # the last column takes writes that must go nowhere
        self.token_ids_SL = untouched_zeros((max_num_seqs, self.row_len), torch.int64, device)

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Upload the texts of requests that get a row."""
        for admission in admissions:
            text = admission.token_ids.astype(np.int64)
            (sent,) = to_device([text], self.token_ids_SL.device)
            self.token_ids_SL[admission.slot, : len(text)] = sent
