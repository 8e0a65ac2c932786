"""Whether weights in fewer bits are read faster on this machine: a short measurement.

The answer depends on where the weights lie. Those of a small drafter stay in the processor's cache,
where taking codes apart costs time; those of a large model come from memory, where fewer bytes win.

Dimension key: T rows, D inputs, E outputs.
"""

import statistics
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from outdraft.core.weight_format import WeightFormat
from outdraft.kernels.ops import Kernels
from outdraft.kernels.products import Product

# Hidden size and number of square products: 2 MB and 256 MB in 16 bits.
SMALL, LARGE = (512, 4), (2048, 32)
FORMATS = WeightFormat.INT8, WeightFormat.INT4
_TURNS = 20
_PAYS = 1.1  # speeds up to this one are noise


def quantized_speeds(
    kernels: Kernels, dtype: torch.dtype, hidden: int, num_products: int
) -> dict[WeightFormat, float]:
    """Measure how many times as fast one row passes through int8 and int4 as through `dtype`.

    The formats take turns; the medians are compared.
    """
    weight_ED = torch.randn(hidden, hidden).bfloat16().to(dtype)
    x_TD = torch.randn(1, hidden).to(dtype)
    products = [
        [kernels.pack_linear(weight_ED, None, kept) for _ in range(num_products)]
        for kept in (None, *FORMATS)
    ]
    times_s = [[_seconds(of_one, x_TD) for of_one in products] for _ in range(_TURNS)]
    plain_s, *coded_s = (statistics.median(of_one) for of_one in zip(*times_s, strict=True))
    return {kept: plain_s / one_s for kept, one_s in zip(FORMATS, coded_s, strict=True)}


def advice(speeds: Mapping[WeightFormat, float]) -> str:
    """Say which format is the fastest, and whether it pays."""
    told = ", ".join(f"{kept} {speed:.2f}" for kept, speed in speeds.items())
    best = max(speeds, key=lambda kept: speeds[kept])
    verdict = f"{best} is recommended" if speeds[best] > _PAYS else "none is recommended"
    return f"{told} times as fast as weights as they are: {verdict}"


def _seconds(products: Sequence[Product], x_TD: Tensor) -> float:
    start_s = time.perf_counter()
    for product in products:
        product(x_TD)
    return time.perf_counter() - start_s
