"""The share of a row's attention that each block of its text gets, in torch, for any device.

Dimension key: B requests, H heads, G kv heads, R query heads per kv head, C head size, P blocks,
S slots per block, K keys of the longest request.
"""

import torch
from torch import Tensor


def block_mass(
    q_BHC: Tensor, k_PSGC: Tensor, block_table_BP: Tensor, num_keys_B: Tensor, scale: float
) -> Tensor:
    """Sum one row's attention over each block of its text: float32 [B, P], new.

    softmax(scale * q k^T) over the first keys of each request, summed over all heads and over the
    slots of each block; 0 for blocks after them.

    Args:
        q_BHC: of one row of each request, of the dtype of the keys.
        k_PSGC: of the layer's cache.
        block_table_BP: int32, as in AttentionMetadata.
        num_keys_B: int64, at least 1.
    """
    block_size, num_kv_heads = k_PSGC.shape[1:3]
    width = block_table_BP.shape[1]
    dtype = torch.promote_types(q_BHC.dtype, torch.float32)
    keys_K = torch.arange(width * block_size, device=q_BHC.device)
    masses: list[Tensor] = []
    for q_HC, blocks_P, num_keys in zip(q_BHC, block_table_BP, num_keys_B, strict=True):
        k_KGC = k_PSGC[blocks_P.long()].flatten(0, 1).to(dtype)
        q_GRC = q_HC.to(dtype).unflatten(0, (num_kv_heads, -1))
        scores_GRK = torch.einsum("grc,kgc->grk", q_GRC, k_KGC) * scale
        weights_GRK = scores_GRK.masked_fill(keys_K >= num_keys, -torch.inf).softmax(-1)
        masses.append(weights_GRK.sum((0, 1)).view(width, block_size).sum(1))
    return torch.stack(masses).float()
