# pyright: reportCallIssue=false, reportArgumentType=false
# A launch takes more than the parameters of the kernel.
"""The texts of a GPU, by the kernel of text_kernels.py: one launch for eight.

Dimension key: B requests, N most new tokens of one, S texts, L tokens.
"""

import triton
from torch import Tensor

from outdraft.kernels.triton import text_kernels as kernels


def append_token_ids(
    texts_SL: Tensor, state_rows_B: Tensor, starts_B: Tensor, token_ids_BN: Tensor
) -> None:
    num_requests, width = token_ids_BN.shape
    if num_requests == 0 or width == 0:
        return
    kernels.append_ids[(num_requests,)](
        texts_SL,
        state_rows_B.contiguous(),
        starts_B.contiguous(),
        token_ids_BN.contiguous(),
        texts_SL.shape[1],
        width,
        WIDTH=triton.next_power_of_2(width),
    )
