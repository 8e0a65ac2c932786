"""Names of full blocks: a hash of all tokens from the start of the text to the block's end.

The hash of a block covers the hash of the block before it, so equal hashes mean equal prefixes
(BLAKE2b, 128 bits). Texts of different salts have no block in common.
"""

from hashlib import blake2b

import numpy as np


def extend_hashes(
    hashes: list[bytes],
    token_ids: np.ndarray,
    block_size: int,
    num_tokens: int,
    salt: bytes = b"",
) -> None:
    """Append the hashes of full blocks within the first `num_tokens` that `hashes` lacks.

    `salt`: b"", or a digest that is longer than a block's: no salt passes for another text's block.
    """
    num_tokens = min(num_tokens, len(token_ids))
    for block in range(len(hashes), num_tokens // block_size):
        digest = blake2b(hashes[block - 1] if block else salt, digest_size=16)
        end = (block + 1) * block_size
        digest.update(token_ids[block * block_size : end].tobytes())
        hashes.append(digest.digest())
