"""The vectors of tokens, as numbers or as the codes of a product."""

from torch import Tensor, nn

from outdraft.kernels.products import EmbeddingTable, Product
from outdraft.models.layers.linear import Linear


class Embedding(nn.Module):
    """A table [V, D].

    Attributes:
        weight: its numbers; None: they are codes.
        table: what is read.
    """

    def __init__(self, table: EmbeddingTable) -> None:
        super().__init__()
        numbers = table.source
        self.weight: nn.Parameter | None = None
        if isinstance(numbers, Tensor):
            self.weight = nn.Parameter(numbers, requires_grad=False)
        self.table, self._owns_codes = table, False

    def take(self, product: Product, *, is_shared: bool) -> None:
        """Read the outputs of a product from now on; the numbers are freed.

        Args:
            is_shared: it is a head, which counts its bytes.
        """
        self.table = EmbeddingTable(
            product, self.table.num_tokens, self.table.size, self.table.dtype
        )
        self.weight, self._owns_codes = None, not is_shared

    @property
    def packed_bytes(self) -> int:
        """Bytes of codes that no head counts."""
        return self.table.nbytes if self._owns_codes else 0

    def forward(self, token_ids: Tensor) -> Tensor:
        """The vectors of int64 ids of any shape, [*, D]."""
        return self.table(token_ids)


def is_one_tensor(table: EmbeddingTable, head: Linear) -> bool:
    """Whether an embedding reads what a head multiplies: its codes, or its plain weight."""
    if isinstance(table.source, Tensor):
        weight = head.weight
        return weight is not None and weight.data_ptr() == table.source.data_ptr()
    return table.source is head.product
