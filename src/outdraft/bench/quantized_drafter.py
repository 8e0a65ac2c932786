"""Whether a drafter's weights in 8 bits are read faster on this machine: a short measurement.

The answer depends on where the weights lie. Those of a small drafter stay in the processor's cache,
where taking codes apart costs time; those of a large one come from memory, where fewer bytes win.

Dimension key: T rows, D inputs, E outputs.
"""

import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.ops import Kernels, Product

# Hidden size and number of square products: 2 MB and 64 MB in 16 bits.
SMALL, LARGE = (512, 4), (2048, 8)
_TURNS = 30
_PAYS = 1.1  # speeds up to this one are noise


def int8_speed(kernels: Kernels, dtype: torch.dtype, hidden: int, num_products: int) -> float:
    """How many times as fast one row passes through int8 weights as through those of `dtype`.

    The two take turns; the medians are compared.
    """
    weight_ED = torch.randn(hidden, hidden).bfloat16().to(dtype)
    x_TD = torch.randn(1, hidden).to(dtype)
    plain, int8 = (
        [kernels.pack_linear(weight_ED, None, kept) for _ in range(num_products)]
        for kept in (None, WeightFormat.INT8)
    )
    times_s = [(_seconds(plain, x_TD), _seconds(int8, x_TD)) for _ in range(_TURNS)]
    plain_s, int8_s = (statistics.median(of_one) for of_one in zip(*times_s, strict=True))
    return plain_s / int8_s


def advice(speed: float) -> str:
    """What a user should do about `"quantization"` in speculative_config."""
    verdict = "recommended" if speed > _PAYS else "not recommended"
    return f"int8 is {speed:.2f} times as fast as weights as they are: {verdict}"


def _seconds(products: Sequence[Product], x_TD: Tensor) -> float:
    start_s = time.perf_counter()
    for product in products:
        product(x_TD)
    return time.perf_counter() - start_s
