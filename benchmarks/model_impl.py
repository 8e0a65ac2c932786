"""What is lost where the transformers library's code computes a network of Llama's shape?

    python benchmarks/model_impl.py [--shapes 0.5B 1B 8B] [--json out.json]

The same pass, head included, by the network that is built in and by the library's with this
engine's attention and products (`--model-impl`). Weights are random. 8B has four of the model's
layers and a quarter of its vocabulary. The candidates take turns, so that whatever else the machine
does meets both alike; times are medians.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from outdraft.attention.rows import Span
from outdraft.bench.report import compute, environment
from outdraft.kernels.choose import choose_kernels
from outdraft.kv.cache import KVCache
from outdraft.models.choose import load_language_model
from tests.row_batches import row_batch

DTYPE, CPU = torch.bfloat16, torch.device("cpu")
IMPLEMENTATIONS = "outdraft", "transformers"
BLOCK_SIZE, CONTEXT = 16, 200
COMMON: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "hidden_act": "silu",
}
NAMES = "hidden_size", "intermediate_size", "num_hidden_layers", "head_dim", "vocab_size"
SHAPES = {
    "0.5B": (1024, 3072, 28, 128, 32000),
    "1B": (2048, 8192, 16, 64, 128256),  # Llama 3.2
    "8B": (4096, 14336, 4, 128, 32000),  # of Llama 3.1
}
HEADS = {"0.5B": (16, 8), "1B": (32, 8), "8B": (32, 8)}


def rows_of_requests() -> dict[int, list[Span]]:
    """What a pass computes, by its number of rows: a token; four drafts behind one; a token of each
    of eight requests; a prompt."""
    blocks = -(-CONTEXT // BLOCK_SIZE) + 1
    tables = [list(range(1 + blocks * b, 1 + blocks * (b + 1))) for b in range(8)]
    return {
        1: [Span(CONTEXT, 1, (), tables[0])],
        5: [Span(CONTEXT, 1, (0, 1, 2, 3), tables[0])],
        8: [Span(CONTEXT, 1, (), table) for table in tables],
        128: [Span(0, 128, (), tables[0])],
    }


def config_of(shape: str) -> dict[str, Any]:
    """config.json."""
    num_heads, num_kv_heads = HEADS[shape]
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    return COMMON | heads | dict(zip(NAMES, SHAPES[shape], strict=True))


def measure(shape: str, repeats: int) -> list[dict[str, Any]]:
    """Samples by rows and by implementation."""
    kernels = choose_kernels("auto", CPU, DTYPE)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "config.json").write_text(json.dumps(config_of(shape)))
        models = {
            name: load_language_model(
                path, DTYPE, CPU, kernels, implementation=name, has_random_weights=True
            )
            for name in IMPLEMENTATIONS
        }
    config = models["outdraft"].config
    caches = KVCache(config.cache_shapes, 150, BLOCK_SIZE, DTYPE, CPU).layers
    found = list[dict[str, Any]]()
    for num_rows, spans in rows_of_requests().items():
        metadata = row_batch(spans, BLOCK_SIZE)
        ids_T = torch.randint(config.vocab_size, (num_rows,))
        samples_s = {name: list[float]() for name in models}
        for _ in range(repeats):
            for name, model in models.items():
                start_s = time.perf_counter()
                hidden_TD, _ = model.forward_tapped(ids_T, caches, metadata, ())
                model.checked_best_tokens(hidden_TD[-1:])
                samples_s[name].append(time.perf_counter() - start_s)
        own_s, library_s = (statistics.median(samples_s[name]) for name in IMPLEMENTATIONS)
        row = {"shape": shape, "rows": num_rows, "speed_of_own": own_s / library_s}
        print(
            f"{shape}, {num_rows:3} rows: {own_s * 1e3:.1f} ms, the library's "
            f"{library_s * 1e3:.1f} ms: {own_s / library_s:.2f} times the speed",
            flush=True,
        )
        found.append(row | {"samples_s": samples_s})
    return found


@torch.inference_mode()
def main() -> None:
    """Measure, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--json", type=Path, help="also write all samples here")
    args = parser.parse_args()
    settings = [row for shape in args.shapes for row in measure(shape, args.repeats)]
    if args.json:
        shapes = {shape: config_of(shape) for shape in args.shapes}
        result = {"environment": environment() | compute(), "shapes": shapes, "settings": settings}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
