"""Every operation once: what it is given, what it returns, what it promises.

`Kernels` is a table with one entry for each. `choose.py` fills it, once, when a model is loaded;
whoever computes gets the table and calls `kernels.<operation>(...)`. The readable meaning of each
operation is in `reference/`. Those on texts are described in text_ops.py.

Dimension key: B requests, T rows, P blocks, K drafted rows of all requests, D inputs, E outputs.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from outdraft.kernels.text_ops import NgramTextsMaker, SuffixTextsMaker

if TYPE_CHECKING:
    from torch import Tensor

    from outdraft.attention.base import AttentionBackend


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Where rows stand; fields as in AttentionMetadata, on the host.

    Attributes:
        query_start_B1: int32.
        ancestors_T, positions_T, slots_T: int64.
    """

    query_start_B1: np.ndarray
    ancestors_T: np.ndarray
    positions_T: np.ndarray
    slots_T: np.ndarray


class PlaceRows(Protocol):
    """Lay out the rows of a step: for each request its causal rows, then its drafted ones."""

    def __call__(
        self,
        context_lens_B: np.ndarray,
        num_causal_B: np.ndarray,
        num_drafts_B: np.ndarray,
        parents_K: np.ndarray,
        block_table_BP: np.ndarray,
        block_size: int,
    ) -> PlacedRows:
        """New arrays.

        Args:
            context_lens_B, num_causal_B, num_drafts_B: int32.
            parents_K: int64, of the drafted rows of all requests, as in Draft.
            block_table_BP: int32, contiguous; it covers all rows.
        """
        ...


class WeightFormat(StrEnum):
    """How the weight of a product is kept."""

    PLAIN = "plain"  # as it came
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Product(Protocol):
    """x W^T + b, with a weight that is kept as it is read fastest.

    A row's bits depend neither on the rows beside it nor on the number of threads.

    Attributes:
        nbytes: of its own copy of the weight; 0: it reads the one that it was made from.
    """

    format: WeightFormat
    nbytes: int

    def __call__(self, x_TD: "Tensor") -> "Tensor":
        """[T, E], of x's dtype, which is the weight's. float32 sums or better; rounded once."""
        ...


class PackLinear(Protocol):
    """Make the product with a weight. Neither is changed or written later."""

    def __call__(
        self,
        weight_ED: "Tensor",
        bias_E: "Tensor | None",
        quantization: WeightFormat | None = None,
    ) -> Product:
        """Its numbers are those of `weight_ED`, or those that `quantization` rounds them to."""
        ...


@dataclass(frozen=True, slots=True)
class Kernels:
    """Which implementation runs for each operation.

    Attributes:
        name: for people.
    """

    name: str
    attention: "AttentionBackend"
    place_rows: PlaceRows
    pack_linear: PackLinear
    ngram_texts: NgramTextsMaker
    suffix_texts: SuffixTextsMaker
