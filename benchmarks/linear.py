"""What do the products of one decoding step cost, by the layout of the weights and by rows?

    GOMP_SPINCOUNT=2000 python benchmarks/linear.py [--threads 2] [--json out.json]

The weights are those of a model of 13 million parameters and are bfloat16 numbers, so float32 and
bfloat16 layouts hold the same ones. The layouts take turns, so that whatever else the machine does
meets them all alike. A step is every product once; GOMP_SPINCOUNT is what the launcher sets.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from outdraft.bench.environment import compute, environment
from outdraft.models.layers.linear import Linear, Packing

SHAPES = [(512, 1024), (512, 512), (512, 2560), (1280, 512)] * 4 + [(512, 4096)]
MANY_ROWS = 32  # from here on a step is long, and fewer steps are enough
LAYOUTS = {
    "bf16": (Packing.BF16, torch.float32),
    "bf16, one thread": (Packing.BF16, torch.float32),
    "bf16, bfloat16 rows": (Packing.BF16, torch.bfloat16),
    "float32 onednn": (Packing.ONEDNN, torch.float32),
    "float32 plain": (Packing.PLAIN, torch.float32),
    "bfloat16 onednn": (Packing.ONEDNN, torch.bfloat16),
}


def linears(packing: Packing, dtype: torch.dtype) -> list[Linear]:
    """One step's products, with the weights that every layout gets."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for num_inputs, num_outputs in SHAPES:
        linear = Linear(
            num_inputs, num_outputs, bias=False, dtype=dtype, device=torch.device("cpu")
        )
        weight_ED = torch.randn(num_outputs, num_inputs, generator=generator) * num_inputs**-0.5
        linear.weight.data.copy_(weight_ED.bfloat16())
        linear.pack(packing)
        made.append(linear)
    return made


def step_ms(step: list[Linear], num_rows: int, dtype: torch.dtype) -> float:
    """One step on random rows."""
    x_by_inputs = {size: torch.randn(num_rows, size).to(dtype) for size, _ in set(SHAPES)}
    start_s = time.perf_counter()
    for linear, (num_inputs, _) in zip(step, SHAPES, strict=True):
        linear(x_by_inputs[num_inputs])
    return (time.perf_counter() - start_s) * 1e3


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 5, 9, 16, 64, 256])
    parser.add_argument("--steps", type=int, default=40, help="a fifth of it for many rows")
    parser.add_argument("--json", type=Path, help="also write all samples here")
    args = parser.parse_args()
    steps = {}
    for name, (packing, dtype) in LAYOUTS.items():
        torch.set_num_threads(1 if "one thread" in name else args.threads)
        steps[name] = linears(packing, dtype)
    torch.set_num_threads(args.threads)
    rows = []
    print(f"milliseconds a step, medians\n{'':20}" + "".join(f"{n:>9}" for n in args.rows))
    for num_rows in args.rows:
        samples_ms: dict[str, list[float]] = {name: [] for name in LAYOUTS}
        num_steps = args.steps if num_rows < MANY_ROWS else max(3, args.steps // 5)
        for _ in range(num_steps + 1):
            for name, (_, dtype) in LAYOUTS.items():
                samples_ms[name].append(step_ms(steps[name], num_rows, dtype))
        for name, samples in samples_ms.items():
            rows.append({"layout": name, "rows": num_rows, "samples_ms": samples[1:]})
    for name in LAYOUTS:
        medians = [statistics.median(r["samples_ms"]) for r in rows if r["layout"] == name]
        print(f"{name:20}" + "".join(f"{ms:9.2f}" for ms in medians))
    if args.json:
        result = {"environment": environment() | compute(), "threads": args.threads, "rows": rows}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
