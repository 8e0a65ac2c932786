"""What does one layer's attention cost, by batch, context and rows of a tree?

    python benchmarks/attention.py [--json out.json]

On a GPU: our kernel against PyTorch's SDPA with an explicit mask and FlexAttention, both on keys
and values that were gathered before. Each is replayed as a CUDA graph, with caches that a large
write has emptied. Without a GPU: the cpu backend against the reference and SDPA. The candidates
take turns, so that whatever else the machine does meets them all alike; times are medians. The
share is that of reading keys and values once at the speed of a copy, measured in the same run.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from outdraft.attention.base import AttentionForm, AttentionMetadata
from outdraft.attention.rows import Span
from outdraft.bench.report import compute, environment
from outdraft.kernels.choose import choose_kernels
from outdraft.kernels.torch.attention import TorchAttention
from outdraft.kv.cache import LayerCache
from tests.row_batches import row_batch

NUM_KV_HEADS, HEADS_PER_KV, HEAD_SIZE, BLOCK_SIZE = 8, 4, 128, 16
SCALE = HEAD_SIZE**-0.5
FORM = AttentionForm(SCALE)
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
FLUSH_BYTES = 1 << 28  # more than any last-level cache that is measured here
TOLERANCE = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
Run = Callable[[], Tensor]


@dataclass(frozen=True)
class Setting:
    """One batch: every request has the same context and a random tree of the same size."""

    batch: int
    context: int
    rows: int

    @property
    def seq_len(self) -> int:
        return self.context + self.rows

    def kv_bytes(self, dtype: torch.dtype) -> int:
        return 2 * self.batch * self.seq_len * NUM_KV_HEADS * HEAD_SIZE * dtype.itemsize

    def needed_bytes(self, dtype: torch.dtype) -> int:
        """The cache, the gathered copy, and one more for every query head."""
        return (2 + HEADS_PER_KV) * self.kv_bytes(dtype)


@dataclass(frozen=True)
class Inputs:
    """The same numbers, paged and gathered."""

    q_THC: Tensor
    cache: LayerCache
    metadata: AttentionMetadata
    q_BHRC: Tensor
    k_BGKC: Tensor
    v_BGKC: Tensor
    mask_BRK: Tensor


def make_inputs(setting: Setting, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Random numbers; blocks in random order."""
    torch.manual_seed(0)
    blocks_each = -(-setting.seq_len // BLOCK_SIZE)
    blocks_BP = torch.randperm(setting.batch * blocks_each).view(setting.batch, blocks_each)
    parents = [int(torch.randint(0, row + 1, ())) for row in range(setting.rows - 1)]
    spans = [Span(setting.context, 1, parents, blocks) for blocks in blocks_BP.tolist()]
    metadata = row_batch(spans, BLOCK_SIZE, device)
    shape = (blocks_BP.numel(), BLOCK_SIZE, NUM_KV_HEADS, HEAD_SIZE)
    cache = LayerCache(*(torch.randn(shape, dtype=dtype, device=device) for _ in range(2)))
    num_rows, num_heads = setting.batch * setting.rows, NUM_KV_HEADS * HEADS_PER_KV
    q_THC = torch.randn(num_rows, num_heads, HEAD_SIZE, dtype=dtype, device=device)
    gathered = [
        part[blocks_BP.to(device)].flatten(1, 2)[:, : setting.seq_len].transpose(1, 2).contiguous()
        for part in (cache.k_PSGC, cache.v_PSGE)
    ]
    key_K = torch.arange(setting.seq_len, device=device)
    bits_BR1 = metadata.ancestors_T.view(setting.batch, setting.rows, 1)
    draft_K = key_K - setting.context - 1
    mask_BRK = (draft_K < 0) | ((bits_BR1 >> draft_K.clamp(0, 63)) & 1).bool()
    q_BHRC = q_THC.view(setting.batch, setting.rows, num_heads, HEAD_SIZE).transpose(1, 2)
    k_BGKC, v_BGKC = gathered
    return Inputs(q_THC, cache, metadata, q_BHRC.contiguous(), k_BGKC, v_BGKC, mask_BRK)


def paged(attention, inputs: Inputs) -> Run:
    """One of our backends."""
    return lambda: attention.attend(inputs.q_THC, inputs.cache, inputs.metadata, FORM)


def sdpa(inputs: Inputs) -> Run:
    """PyTorch's own attention with the whole mask."""
    q, k, v, mask = inputs.q_BHRC, inputs.k_BGKC, inputs.v_BGKC, inputs.mask_BRK[:, None]
    attend = functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, attn_mask=mask, scale=SCALE, enable_gqa=True)


def flex(inputs: Inputs) -> Run:
    """PyTorch's compiled attention with the mask as a function and a sparse block mask."""
    batch, _, rows, _ = inputs.q_BHRC.shape
    bits_BR = inputs.metadata.ancestors_T.view(batch, rows)
    seq_len = inputs.k_BGKC.shape[2]
    first_draft = seq_len - rows + 1

    def is_seen(b, h, row, key):
        draft = key - first_draft
        return (draft < 0) | ((bits_BR[b, row] >> draft.clamp(0, 63)) & 1).bool()

    mask = create_block_mask(is_seen, batch, None, rows, seq_len, device=bits_BR.device)
    attend = torch.compile(flex_attention, dynamic=False)
    q, k, v = inputs.q_BHRC, inputs.k_BGKC, inputs.v_BGKC
    return lambda: attend(q, k, v, block_mask=mask, scale=SCALE, enable_gqa=True)


def candidates(inputs: Inputs, device: torch.device) -> dict[str, Run]:
    """By name; ours first."""
    fast = choose_kernels("auto", device, inputs.q_THC.dtype).attention
    runs = {type(fast).__name__: paged(fast, inputs), "sdpa": sdpa(inputs)}
    if device.type == "cpu":
        return runs | {"reference": paged(TorchAttention(), inputs)}
    torch.compiler.reset()  # or the shapes so far would count against the limit of recompiles
    return {name: graphed(run) for name, run in (runs | {"flex": flex(inputs)}).items()}


def graphed(run: Run) -> Run:
    """The same work without its launches."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = run()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def time_us(run: Run, device: torch.device, flush: Tensor) -> float:
    """One call, with cold caches."""
    flush.zero_()
    if device.type == "cpu":
        start_s = time.perf_counter()
        run()
        return (time.perf_counter() - start_s) * 1e6
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def copy_gb_per_s(device: torch.device, flush: Tensor) -> float:
    """Bytes read and written by a copy, per second: the best of some."""
    source = torch.ones(COPY_BYTES[device.type], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best_us = min(time_us(lambda: target.copy_(source), device, flush) for _ in range(10))
    return 2 * source.numel() / best_us / 1e3


def largest_difference(results: dict[str, Tensor], setting: Setting, tolerance: float) -> float:
    """Between the first result and the others, which must not exceed the tolerance."""
    num_heads = NUM_KV_HEADS * HEADS_PER_KV
    shape_BRHC = (setting.batch, setting.rows, num_heads, HEAD_SIZE)
    rows = [
        result.view(shape_BRHC) if result.dim() == 3 else result.transpose(1, 2)
        for result in results.values()
    ]
    most = max(float((row - rows[0]).abs().max()) for row in rows)
    assert most <= tolerance, f"{setting}: results differ by {most}"
    return most


def measure(
    setting: Setting, dtype: torch.dtype, device: torch.device, repeats: int, flush: Tensor
) -> tuple[dict[str, list[float]], float]:
    """Samples in microseconds by candidate, and by how much their results differ."""
    runs = candidates(make_inputs(setting, dtype, device), device)
    results = {name: run() for name, run in runs.items()}
    difference = largest_difference(results, setting, TOLERANCE[dtype])
    samples_us: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            samples_us[name].append(time_us(run, device, flush))
    return samples_us, difference


def free_bytes(device: torch.device) -> int | None:
    """None: it is not known, and the settings are small."""
    if device.type == "cpu":
        return None
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_gpu = device.type == "cuda"
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    many = {"type": int, "nargs": "+"}
    parser.add_argument("--batches", default=[1, 8, 64] if is_gpu else [1, 4], **many)
    contexts = [1024, 8192, 32768] if is_gpu else [256, 2048]
    parser.add_argument("--contexts", default=contexts, **many)
    parser.add_argument("--rows", default=[1, 8, 16, 64] if is_gpu else [1, 8], **many)
    parser.add_argument("--repeats", type=int, default=30 if is_gpu else 7)
    parser.add_argument("--json", type=Path, help="also write all samples here")
    args = parser.parse_args()
    dtype = torch.bfloat16 if is_gpu else torch.float32
    flush = torch.zeros(FLUSH_BYTES, dtype=torch.uint8, device=device)
    copied = copy_gb_per_s(device, flush)
    print(f"copy: {copied:.0f} GB/s; microseconds, and the share of that speed")
    settings = [Setting(b, c, r) for b in args.batches for c in args.contexts for r in args.rows]
    rows = []
    for setting in settings:
        row = {"batch": setting.batch, "context": setting.context, "rows": setting.rows}
        label = f"batch {setting.batch:3} context {setting.context:6} rows {setting.rows:3}"
        free = free_bytes(device)
        if free is not None and setting.needed_bytes(dtype) > 0.9 * free:
            print(f"{label}  skipped: it does not fit in memory")
            rows.append(row | {"skipped": "memory"})
            continue
        samples_us, difference = measure(setting, dtype, device, args.repeats, flush)
        cells = []
        for name, samples in samples_us.items():
            median = statistics.median(samples)
            share = setting.kv_bytes(dtype) / median / 1e3 / copied
            cells.append(f"{name} {median:9.1f} ({share:4.0%})")
        print(label + "  " + "  ".join(cells), flush=True)
        rows.append(row | {"samples_us": samples_us, "largest_difference": difference})
    if args.json:
        shape = {"kv_heads": NUM_KV_HEADS, "heads_per_kv": HEADS_PER_KV, "head_size": HEAD_SIZE}
        shape |= {"block_size": BLOCK_SIZE, "dtype": str(dtype)}
        result = {"environment": environment() | compute(), "shape": shape}
        if is_gpu:
            result["environment"]["versions"]["triton"] = version("triton")
        result |= {"copy_gb_per_s": copied, "rows": rows}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
