"""How close do products, and whole passes, come to what this machine can do at most?

    python benchmarks/roofline.py [--dtype bfloat16] [--quantization int8] [--json out.json]

A product can take no less time than its weights take to be read, and no less than its operations
take in registers. A pass reads keys and values besides, and computes attention. Both limits are
measured by the library: reading a gibibyte in huge pages with all threads, and multiplying numbers
that never leave the registers. They take turns with what is measured, since what else runs on the
machine slows down both. One thread's time is that of its core, so that others hardly count; that of
several is the clock's. The best of each is compared, and meets the bar of shares.py or does not;
the median of all turns stands beside it.

The network has 449 million parameters (passes.py); a step is every product once. A pass of up to 64
rows is one request with drafts behind 200 tokens, a longer one a prompt; both end with the tokens
that follow. Two numbers more: how much longer eight requests of 200 tokens take than one, and how
much a prompt stretches their step, in units of what the prompt alone would take at most speed.

Dimension key: T rows, D inputs.
"""

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from passes import LAYERS, Network, cases_of
from shares import shares

from outdraft.bench.report import compute, environment
from outdraft.core.weights import QUANTIZATIONS, WeightFormat
from outdraft.kernels.native.library import Limits, open_library, shared_team
from outdraft.kernels.native.linear import NativeProduct
from outdraft.kernels.native.table import native_kernels

ROWS = [1, 2, 4, 5, 8, 16, 32, 64, 256]


def timed(work: Callable[[], int], clock: Callable[[], float]) -> tuple[float, int]:
    """Its seconds and its result."""
    start_s = clock()
    result = work()
    return clock() - start_s, result


def run_step(products: list[NativeProduct], x_by_inputs: dict[int, torch.Tensor]) -> int:
    """All products once; how many they are."""
    for product in products:
        product(x_by_inputs[product.num_inputs])
    return len(products)


def print_shares(result: dict[str, Any]) -> None:
    """A table, and what becomes of one request's step beside others."""
    samples_s, limits_s = result["samples_s"], result["limits_s"]
    print(f"{'':>32} {'ms':>8} {'limit':>8} {'best':>7} {'median':>7}  bar")
    for share in shares(result):
        times = " " * 17
        if share.name in limits_s:
            best_ms, limit_ms = min(samples_s[share.name]) * 1e3, limits_s[share.name] * 1e3
            times = f"{best_ms:>8.2f} {limit_ms:>8.2f}"
        numbers = f"{share.number(share.best):>7} {share.number(share.median):>7}"
        bar = f"  {share.wanted}, {share.verdict}" if share.wanted else ""
        print(f"{share.name:>32} {times} {numbers}{bar}")
    stretch = min(samples_s["pass, 8 requests and the prompt"]) - min(samples_s["pass, 8 requests"])
    stretch /= limits_s["pass, prompt of 256"]
    print(f"a prompt stretches eight requests by {stretch:.2f} of its limit")


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
    clock = time.thread_time if args.threads == 1 else time.perf_counter
    team = shared_team(library, args.threads)
    limits = Limits(team, is_bf16=dtype is torch.bfloat16, clock=clock)
    kernels = native_kernels(library, args.threads)
    network = Network(kernels, args.layers, dtype, quantization)
    products, cases = network.products, cases_of(args.rows)
    sizes = {product.num_inputs for product in products}
    work: dict[str, Callable[[], int]] = {}
    for rows in args.rows:
        inputs = {size: torch.randn(rows, size).to(dtype) for size in sizes}
        work[f"products, {rows}"] = partial(run_step, products, inputs)
    work |= {f"pass, {case.name}": network.step(case) for case in cases}
    bandwidths, peaks = list[float](), list[float]()
    samples_s: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(args.turns):
        for name, call in work.items():
            samples_s[name].append(timed(call, clock)[0])
        bandwidths.append(limits.bandwidth())
        peaks.append(limits.peak())
    num_bytes = sum(product.nbytes for product in products)
    *weights, head = [product.num_inputs * product.num_outputs for product in products]

    def limit_s(read: int, operations: int) -> float:
        return max(read / max(bandwidths), operations / max(peaks))

    limits_s = {
        f"products, {rows}": limit_s(num_bytes, 2 * rows * (sum(weights) + head))
        for rows in args.rows
    }
    for case in cases:
        read = num_bytes + case.cache_bytes(args.layers, dtype.itemsize)
        operations = case.operations(sum(weights), head, args.layers)
        limits_s[f"pass, {case.name}"] = limit_s(read, operations)
    print(f"{platform.processor() or platform.machine()}, {library.name}, {args.threads} threads")
    print(f"read {max(bandwidths) / 1e9:.1f} GB/s, multiply {max(peaks) / 1e9:.0f} GFLOP/s")
    print(f"weights {num_bytes / 1e6:.0f} MB")
    result = {
        "environment": environment() | compute(),
        "library": library.name,
        "threads": args.threads,
        "dtype": args.dtype,
        "quantization": args.quantization,
        "weight_bytes": num_bytes,
        "operations_of_a_row": 2 * (sum(weights) + head),
        "bandwidths": bandwidths,
        "peaks": peaks,
        "limits_s": limits_s,
        "samples_s": samples_s,
    }
    print_shares(result)
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
