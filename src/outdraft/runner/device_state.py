"""What stays on the device between steps: the tokens of every running request.

Dimension key: S rows of state (one a running request), L tokens, B requests, N drafts.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from outdraft.attention.rows import to_device
from outdraft.core.admission import Admission
from outdraft.kernels.ops import Kernels
from outdraft.kv.cache import untouched_zeros


class DeviceState:
    """token_ids_SL, int64: the text of the request that owns row s; the rest is unspecified.

    A token sampled on the device is written here and read from here; it never has to come back
    from the host.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, device: torch.device, kernels: Kernels
    ) -> None:
        self.row_len = max_model_len + 1  # the last column takes writes that must go nowhere
        self.token_ids_SL = untouched_zeros((max_num_seqs, self.row_len), torch.int64, device)
        self._kernels = kernels

    def admit(self, admissions: Sequence[Admission]) -> None:
        """Upload the texts of requests that get a row."""
        for admission in admissions:
            text = admission.token_ids.astype(np.int64)
            (sent,) = to_device([text], self.token_ids_SL.device)
            self.token_ids_SL[admission.slot, : len(text)] = sent

    def append(self, state_rows_B: Tensor, starts_B: Tensor, token_ids_BN: Tensor) -> None:
        """Write emitted tokens (padded with -1) behind the first starts_B of each text."""
        self._kernels.append_token_ids(
            self.token_ids_SL, state_rows_B, starts_B, token_ids_BN.contiguous()
        )
