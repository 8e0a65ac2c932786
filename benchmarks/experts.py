"""How fast are mixtures of experts by the kernels, beside the transformers library's own code?

    python benchmarks/experts.py [--json out.json]

A stack of Mixtral's feed-forward blocks, routers included, without attention: what differs between
the candidates. The library's code runs eagerly, expert by expert, and by its grouped product; ours
with plain and with quantised weights. Rows are random, so that they go to different experts. The
candidates take turns, so that whatever else the machine does meets them all alike; times are
medians. The weights of a step are those of the experts that its rows meet; the speed at which ours
reads them is given beside what this machine reads at most.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from outdraft.bench.report import compute, environment
from outdraft.core.weights import WeightFormat
from outdraft.kernels.choose import choose_kernels, machine_limits
from outdraft.models.library.checkpoint import Packing
from outdraft.models.library.experts import replace_experts

ROWS = [1, 4, 8, 32]
DTYPE, CPU = torch.bfloat16, torch.device("cpu")
SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 1792,
    "num_hidden_layers": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
TOLERANCE = 3e-2  # of the largest number; both round to bfloat16 on the way


def library_blocks() -> nn.ModuleList:
    """With random weights of the size that keeps numbers as large as they are."""
    torch.manual_seed(0)
    blocks = nn.ModuleList(
        MixtralSparseMoeBlock(MixtralConfig(**SHAPE)) for _ in range(SHAPE["num_hidden_layers"])
    ).to(DTYPE)
    for weight in blocks.parameters():
        weight.data.normal_(std=weight.shape[-1] ** -0.5)
    return blocks.eval().requires_grad_(False)


def packed_blocks(blocks: nn.ModuleList, quantization: WeightFormat | None) -> nn.ModuleList:
    """The same blocks with experts by the kernels."""
    copied = copy.deepcopy(blocks)
    replace_experts(copied, Packing(choose_kernels("auto", CPU, DTYPE), quantization))
    return copied


def stacked(blocks: Any, implementation: str = "eager") -> Callable[[Tensor], Tensor]:
    """All blocks, one behind the other, each added to what it reads.

    Args:
        implementation: the library's name for the code of experts.
    """

    def run(x_1TD: Tensor) -> Tensor:
        for block in blocks:
            if hasattr(block.experts, "config"):
                block.experts.config._experts_implementation = implementation
            x_1TD = x_1TD + block(x_1TD)
        return x_1TD

    return run


def candidates() -> dict[str, Callable[[Tensor], Tensor]]:
    """By name."""
    blocks = library_blocks()
    found = {name: stacked(blocks, name) for name in ("eager", "grouped_mm")}
    for quantization in (None, WeightFormat.INT8, WeightFormat.INT4):
        name = f"native {quantization or 'bfloat16'}"
        found[name] = stacked(packed_blocks(blocks, quantization))
    return found


def expert_bytes() -> int:
    """Those of one expert in all layers, in bfloat16."""
    widths = 3 * SHAPE["hidden_size"] * SHAPE["intermediate_size"]
    return widths * SHAPE["num_hidden_layers"] * DTYPE.itemsize


def experts_met(x_1TD: Tensor, blocks: Any) -> float:
    """How many experts of a layer the rows meet, on average."""
    met = list[int]()

    def count(_: nn.Module, __: object, out: tuple[Tensor, ...]) -> None:
        met.append(len(out[-1].unique()))

    hooks = [block.gate.register_forward_hook(count) for block in blocks]
    stacked(blocks)(x_1TD)
    for hook in hooks:
        hook.remove()
    return statistics.mean(met)


@torch.inference_mode()
def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="also write all samples here")
    args = parser.parse_args()
    limits = machine_limits(DTYPE)
    runs = candidates()
    blocks = library_blocks()
    print(f"read at most: {limits[0] / 1e9 if limits else 0:.1f} GB/s; tokens a second")
    found = list[dict[str, object]]()
    for num_rows in ROWS:
        x_1TD = torch.randn(1, num_rows, SHAPE["hidden_size"]).to(DTYPE)
        results = {name: run(x_1TD) for name, run in runs.items()}
        want, got = results["eager"].double(), results["native bfloat16"].double()
        difference = float((got - want).abs().max() / want.abs().max())
        assert difference < TOLERANCE, f"{num_rows} rows: results differ by {difference}"
        samples_s = {name: list[float]() for name in runs}
        for _ in range(args.repeats):
            for name, run in runs.items():
                start_s = time.perf_counter()
                run(x_1TD)
                samples_s[name].append(time.perf_counter() - start_s)
        tokens_s = {name: num_rows / statistics.median(one) for name, one in samples_s.items()}
        met = experts_met(x_1TD, blocks)
        read = met * expert_bytes() * tokens_s["native bfloat16"] / num_rows
        cells = "  ".join(f"{name} {speed:7.0f}" for name, speed in tokens_s.items())
        print(f"{num_rows:3} rows, {met:.1f} experts: {cells}  ({read / 1e9:.1f} GB/s)", flush=True)
        found.append(
            {
                "rows": num_rows,
                "experts_met": met,
                "tokens_per_s": tokens_s,
                "native_bytes_per_s": read,
                "largest_difference": difference,
                "samples_s": samples_s,
            }
        )
    if args.json:
        limit = None if limits is None else limits[0]
        result = {"environment": environment() | compute(), "shape": SHAPE | {"dtype": str(DTYPE)}}
        result |= {"bytes_per_s_at_most": limit, "settings": found}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
