"""KV blocks: their owners, each request's table, and their names. Ids only: cache.py has tensors.

A block serves the layers of target and drafter at once. A full block whose tokens are known can be
found again by the hash of its whole prefix. It keeps its contents after its last owner has released
it, until the block is needed for another text; the oldest goes first.

The drafter's layers of a block are marked as filled for each draft group, which has layers of its
own. They may depend on the token after the block, too: then they are of use before that token only.

The hash of a block covers the hash of the block before it, so equal hashes mean equal prefixes
(BLAKE2b, 128 bits). Texts of different salts have no block in common.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class LayerCacheShape:
    """The kv heads of one layer, and the numbers of each head's key and of its value.

    It is known before anything is allocated.
    """

    num_kv_heads: int
    key_size: int
    value_size: int


class BlockPool:
    """Reference counts, the free list in order of release, and the blocks found by hash.

    Invariants (`check_invariants`): a block is free exactly when its count is 0; every cached
    hash points to the block that carries it.
    """

    def __init__(self, num_blocks: int, num_draft_groups: int = 1) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._counts = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blocks: dict[bytes, int] = {}
        self._drafter_filled: list[list[int | None]] = [
            [None] * num_blocks for _ in range(num_draft_groups)
        ]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that someone holds, 0 to 1."""
        return 1 - len(self._free) / self.num_blocks

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with unspecified contents, each held once; None if there are too few."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._counts[block] = 1
            self._forget(block)
        return taken

    def share(self, block: int) -> None:
        """Hold a block once more; a free block is taken off the free list with its contents."""
        if self._counts[block] == 0:
            del self._free[block]
        self._counts[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give up one hold of each. The last blocks of a text are reused before its first."""
        for block in reversed(blocks):
            if self._counts[block] < 1:
                raise ValueError(f"block {block} is released but nothing holds it")
            self._counts[block] -= 1
            if self._counts[block] == 0:
                self._free[block] = None
                if self._hashes[block] is None:
                    self._free.move_to_end(block, last=False)

    def find(self, prefix_hash: bytes) -> int | None:
        """The block that holds the end of this prefix, held or free."""
        return self._blocks.get(prefix_hash)

    def remember(self, block: int, prefix_hash: bytes) -> None:
        """Make a full block findable; the first block of a prefix stays the one that is found."""
        if self._hashes[block] is None and prefix_hash not in self._blocks:
            self._hashes[block] = prefix_hash
            self._blocks[prefix_hash] = block

    def prefer(self, block: int, prefix_hash: bytes) -> None:
        """Let a block be found that a drafter has read, if it has not read the one that is."""
        found = self._blocks.get(prefix_hash)
        if found is None or self._hashes[block] is not None or self.has_drafter_read(found):
            return
        self._hashes[found], self._hashes[block] = None, prefix_hash
        self._blocks[prefix_hash] = block
        if self._counts[found] == 0:
            self._free.move_to_end(found, last=False)

    def has_drafter_read(self, block: int) -> bool:
        """True if any draft group's layers of a full block are valid, before any token."""
        return any(filled[block] is not None for filled in self._drafter_filled)

    def is_drafter_filled(self, block: int, read_ahead: int = NO_TOKEN, group: int = 0) -> bool:
        """True if a draft group's layers of a full block are valid too, before this next token."""
        return self._drafter_filled[group][block] == read_ahead

    def mark_drafter_filled(self, block: int, read_ahead: int = NO_TOKEN, group: int = 0) -> None:
        """`read_ahead`: the token after the block, if what the drafter keeps depends on it."""
        self._drafter_filled[group][block] = read_ahead

    def check_invariants(self) -> None:
        """Raise AssertionError if the books do not balance."""
        assert all((count == 0) == (b in self._free) for b, count in enumerate(self._counts))
        assert all(count >= 0 for count in self._counts)
        assert all(self._hashes[block] == key for key, block in self._blocks.items())
        assert sum(h is not None for h in self._hashes) == len(self._blocks)

    def _forget(self, block: int) -> None:
        prefix_hash = self._hashes[block]
        if prefix_hash is not None:
            del self._blocks[prefix_hash]
            self._hashes[block] = None
        for filled in self._drafter_filled:
            filled[block] = None


class BlockTable:
    """Grows by whole blocks ahead of the rows to be written, shrinks after a rejection.

    Only the methods change `ids`. The runner has a copy, which it gets as news.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.ids: list[int] = []
        self._num_sent = 0  # the first ids, which are the same in the runner's copy

    def reserve(self, num_tokens: int) -> bool:
        """Make room for `num_tokens` slots in all; False and unchanged if the pool is too full."""
        missing = -(-num_tokens // self.block_size) - len(self.ids)
        if missing <= 0:
            return True
        blocks = self._pool.allocate(missing)
        if blocks is None:
            return False
        self.ids.extend(blocks)
        return True

    def adopt(self, blocks: list[int]) -> None:
        """Start with shared blocks of a known prefix; the table must be empty."""
        if self.ids:
            raise ValueError("only an empty table can adopt a prefix")
        for block in blocks:
            self._pool.share(block)
        self.ids.extend(blocks)

    def truncate(self, num_tokens: int) -> None:
        """Give back the blocks past the first `num_tokens` slots."""
        keep = -(-num_tokens // self.block_size)
        if keep >= len(self.ids):
            return
        self._pool.release(self.ids[keep:])
        del self.ids[keep:]
        self._num_sent = min(self._num_sent, keep)

    def news(self) -> tuple[int, tuple[int, ...]]:
        """Number of blocks of the runner's copy that stay, and the new ids that follow them."""
        num_kept = self._num_sent
        if num_kept == len(self.ids):
            return num_kept, ()
        self._num_sent = len(self.ids)
        return num_kept, tuple(self.ids[num_kept:])


def extend_hashes(
    hashes: list[bytes], token_ids: np.ndarray, block_size: int, num_tokens: int, salt: bytes = b""
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
