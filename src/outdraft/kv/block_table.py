"""The blocks of one request, in the order of its text."""

from outdraft.kv.block_pool import BlockPool


class BlockTable:
    """Grows by whole blocks ahead of the rows to be written, shrinks after a rejection.

    `ids` is read by the runner; only the methods change it.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.ids: list[int] = []

    def blocks_missing(self, num_tokens: int) -> int:
        """How many blocks `reserve` would have to allocate."""
        return max(0, -(-num_tokens // self.block_size) - len(self.ids))

    def reserve(self, num_tokens: int) -> bool:
        """Make room for `num_tokens` slots in all; False and unchanged if the pool is too full."""
        blocks = self._pool.allocate(self.blocks_missing(num_tokens))
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
        self._pool.release(self.ids[keep:])
        del self.ids[keep:]
