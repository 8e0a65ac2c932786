"""The blocks of one request, in the order of its text."""

from outdraft.kv.block_pool import BlockPool


class BlockTable:
    """Grows by whole blocks ahead of the rows to be written, shrinks after a rejection.

    Only the methods change `ids`. The runner has a copy, which it gets as news.
    """

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.ids: list[int] = []
        self._num_told = 0  # the first ids, which are the same in the runner's copy

    def blocks_missing(self, num_tokens: int) -> int:
        """How many blocks `reserve` would have to allocate."""
        return max(0, -(-num_tokens // self.block_size) - len(self.ids))

    def reserve(self, num_tokens: int) -> bool:
        """Make room for `num_tokens` slots in all; False and unchanged if the pool is too full."""
        missing = self.blocks_missing(num_tokens)
        if not missing:
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
        self._num_told = min(self._num_told, keep)

    def news(self) -> tuple[int, tuple[int, ...]]:
        """How many blocks of the runner's copy stay, and the ids that follow; it has them then."""
        num_kept = self._num_told
        if num_kept == len(self.ids):
            return num_kept, ()
        self._num_told = len(self.ids)
        return num_kept, tuple(self.ids[num_kept:])
