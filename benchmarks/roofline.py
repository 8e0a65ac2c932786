"""How close do products come to what this machine can do at most?

    python benchmarks/roofline.py [--dtype bfloat16] [--quantization int8] [--json out.json]

A product can take no less time than its weights take to be read, and no less than its operations
take in registers. Both limits are measured by the library: reading a gibibyte in huge pages with
all threads, and multiplying numbers that never leave the registers. They take turns with the
products, since what else runs on the machine slows down both. One thread's time is that of its
core, so that others hardly count; that of several is the clock's. The shapes are those of a model
of 449 million parameters; a step is every product once. The best of each is compared.

Dimension key: T rows, D inputs, E outputs.
"""

import argparse
import json
import mmap
import platform
import time
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from pathlib import Path

import numpy as np
import torch

from outdraft.bench.environment import compute, environment
from outdraft.core.weight_format import QUANTIZATIONS, WeightFormat
from outdraft.kernels.native.library import open_library
from outdraft.kernels.native.linear import NativeLinear, NativeProduct
from outdraft.kernels.native.team import Team

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 1024, 28, 16, 8, 128
INTERMEDIATE, VOCABULARY = 3072, 8192
SHAPES_DE = [
    (HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_SIZE),
    (HEADS * HEAD_SIZE, HIDDEN),
    (HIDDEN, 2 * INTERMEDIATE),
    (INTERMEDIATE, HIDDEN),
]
READ_BYTES = 1 << 30
MULTIPLY_UNITS = 256
ROWS = [1, 2, 4, 5, 8, 16, 32, 64, 256]


class Limits:
    """What the machine does at most: bytes/s of memory, operations/s in registers."""

    def __init__(self, team: Team, dtype: torch.dtype, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._team, self._dtype = team, int(dtype is torch.bfloat16)
        self._memory = mmap.mmap(-1, READ_BYTES, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._words = np.frombuffer(self._memory, dtype=np.int64)
        self._words[:] = 1
        function = team.library.function
        self._read = function(
            "roofline_read", [c_void_p, c_void_p, c_int64], c_int64, releases_gil=True
        )
        self._multiply = function(
            "roofline_multiply", [c_void_p, c_int64, c_int64], c_int64, releases_gil=True
        )

    def bandwidth(self) -> float:
        """One reading, bytes/s."""
        seconds, _ = timed(
            lambda: self._read(self._team.address, self._words.ctypes.data, READ_BYTES),
            self._clock,
        )
        return READ_BYTES / seconds

    def peak(self) -> float:
        """One reading, operations/s; a product and a sum are two."""
        seconds, operations = timed(
            lambda: self._multiply(self._team.address, self._dtype, MULTIPLY_UNITS), self._clock
        )
        return operations / seconds


def timed(work: Callable[[], int], clock: Callable[[], float]) -> tuple[float, int]:
    """Its seconds and its result."""
    start_s = clock()
    result = work()
    return clock() - start_s, result


def make_products(
    linear: NativeLinear, num_layers: int, dtype: torch.dtype, quantization: WeightFormat | None
) -> list[NativeProduct]:
    """Those of a step, with random weights that bfloat16 holds."""
    generator = torch.Generator().manual_seed(0)
    products: list[NativeProduct] = []
    for num_inputs, num_outputs in [*SHAPES_DE * num_layers, (HIDDEN, VOCABULARY)]:
        weight_ED = torch.randn(num_outputs, num_inputs, generator=generator) * num_inputs**-0.5
        weight_ED = weight_ED.bfloat16().to(dtype)
        products.append(linear.pack_linear(weight_ED, None, quantization))
    return products


def run_step(products: list[NativeProduct], x_by_inputs: dict[int, torch.Tensor]) -> int:
    """All products once; how many they are."""
    for product in products:
        product(x_by_inputs[product.num_inputs])
    return len(products)


def main() -> None:
    """Measure in turns, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--kernels", help="an instruction set; default: the fastest")
    parser.add_argument("--quantization", choices=QUANTIZATIONS)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--json", type=Path, help="also write all samples here")
    args = parser.parse_args()
    library = open_library(args.kernels)
    if library is None:
        raise SystemExit("there is no compiled library here: run `make lib` first")
    dtype: torch.dtype = getattr(torch, args.dtype)
    quantization = None if args.quantization is None else WeightFormat(args.quantization)
    team = Team(library, args.threads)
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    limits = Limits(team, dtype, clock)
    products = make_products(NativeLinear(team), args.layers, dtype, quantization)
    inputs = {
        rows: {size: torch.randn(rows, size).to(dtype) for size, _ in SHAPES_DE}
        for rows in args.rows
    }
    bandwidths, peaks = list[float](), list[float]()
    samples_s: dict[int, list[float]] = {rows: [] for rows in args.rows}
    for _ in range(args.turns):
        for rows in args.rows:
            of_rows = inputs[rows]
            seconds, _ = timed(lambda of_rows=of_rows: run_step(products, of_rows), clock)
            samples_s[rows].append(seconds)
        bandwidths.append(limits.bandwidth())
        peaks.append(limits.peak())
    num_bytes = sum(product.nbytes for product in products)
    operations = 2 * sum(product.num_inputs * product.num_outputs for product in products)
    print(f"{platform.processor() or platform.machine()}, {library.name}, {args.threads} threads")
    print(f"read {max(bandwidths) / 1e9:.1f} GB/s, multiply {max(peaks) / 1e9:.0f} GFLOP/s")
    print(f"weights {num_bytes / 1e6:.0f} MB\n{'rows':>5} {'ms':>8} {'limit':>8} {'share':>6}")
    for rows, samples in samples_s.items():
        limit_s = max(num_bytes / max(bandwidths), rows * operations / max(peaks))
        best_s = min(samples)
        print(f"{rows:>5} {best_s * 1e3:>8.2f} {limit_s * 1e3:>8.2f} {limit_s / best_s:>6.0%}")
    if args.json:
        result = {
            "environment": environment() | compute(),
            "library": library.name,
            "threads": args.threads,
            "dtype": args.dtype,
            "quantization": args.quantization,
            "weight_bytes": num_bytes,
            "operations_of_a_row": operations,
            "bandwidths": bandwidths,
            "peaks": peaks,
            "samples_s": samples_s,
        }
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
