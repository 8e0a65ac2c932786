"""What do weights in 8 and 4 bits cost in quality, and what do they gain in speed?

    python benchmarks/quantization.py [--model DIR] [--json out.json]

Perplexity is that of the embedded held-out prompts; speed is that of plain greedy decoding of one
request, without its prompt. Behind it stand the products of a model of 449 million parameters
alone, as in roofline.py: the time of one row beside that of reading the weights, and how much
longer the rows of a draft take. The formats take turns. By default for the embedded target.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from passes import LAYERS, Network
from roofline import run_step

from outdraft import LLM, SamplingParams, assets
from outdraft.bench.report import compute, environment
from outdraft.core.weights import QUANTIZATIONS, WeightFormat
from outdraft.kernels.native.library import Limits, open_library, shared_team
from outdraft.kernels.native.table import native_kernels

ROWS = (1, 5, 8)
LABEL = "as they are"
NUM_TEXTS = 24  # of those whose perplexity is measured


def perplexity(llm: LLM, texts: list[str]) -> float:
    """exp of the mean negative log probability of the tokens but the first of each text."""
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    logprobs = [
        row[token].logprob
        for output in llm.generate(texts, params, use_tqdm=False)
        for token, row in zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=True)
        if row is not None
    ]
    return math.exp(-statistics.fmean(logprobs))


def decode_s(llm: LLM, text: str, num_tokens: int) -> float:
    """Seconds for a token of plain greedy decoding."""
    seconds = dict[int, float]()
    for length in (1, num_tokens + 1):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
        start_s = time.perf_counter()
        llm.generate(text, params, use_tqdm=False)
        seconds[length] = time.perf_counter() - start_s
    return (seconds[num_tokens + 1] - seconds[1]) / num_tokens


def measure_products(formats: Sequence[str | None], turns: int) -> dict[str | None, dict[str, Any]]:
    """For each format: bytes of the weights, and samples of all products by rows, in bfloat16."""
    library = open_library()
    assert library is not None, "run `make lib` first"
    num_threads = torch.get_num_threads()
    limits = Limits(shared_team(library, num_threads), is_bf16=True)
    found = dict[str | None, dict[str, Any]]()
    bandwidths, peaks = list[float](), list[float]()
    for name in formats:
        kept = None if name is None else WeightFormat(name)
        kernels = native_kernels(library, num_threads)
        products = Network(kernels, LAYERS, torch.bfloat16, kept).products
        inputs = {
            rows: {one.num_inputs: torch.randn(rows, one.num_inputs).bfloat16() for one in products}
            for rows in ROWS
        }
        samples_s: dict[int, list[float]] = {rows: [] for rows in ROWS}
        for _ in range(turns):
            for rows in ROWS:
                start_s = time.perf_counter()
                run_step(products, inputs[rows])
                samples_s[rows].append(time.perf_counter() - start_s)
            bandwidths.append(limits.bandwidth())
            peaks.append(limits.peak())
        found[name] = {
            "weight_bytes": sum(product.nbytes for product in products),
            "operations_of_a_row": 2 * sum(one.num_inputs * one.num_outputs for one in products),
            "samples_s": samples_s,
        }
    for of_format in found.values():  # by the best readings of the whole time
        read_s = of_format["weight_bytes"] / max(bandwidths)
        row_s = of_format["operations_of_a_row"] / max(peaks)
        of_format["limits_s"] = {rows: max(read_s, rows * row_s) for rows in ROWS}
    return found


def print_products(found: dict[str | None, dict[str, Any]]) -> None:
    """A line for each format."""
    shares = "  ".join(f"share at {rows:>2}" for rows in ROWS)
    print(f"{'products':16} {'MB':>6} {'ms at 1':>8}  {shares}  T(5)/T(1)  T(8)/T(1)")
    for name, of_format in found.items():
        best_s = {rows: min(samples) for rows, samples in of_format["samples_s"].items()}
        shares = "  ".join(f"{of_format['limits_s'][n] / best_s[n]:>11.0%}" for n in ROWS)
        more = "  ".join(f"{best_s[rows] / best_s[1]:>9.2f}" for rows in ROWS[1:])
        megabytes = of_format["weight_bytes"] / 1e6
        print(f"{name or LABEL:16} {megabytes:>6.0f} {best_s[1] * 1e3:>8.2f}  {shares}  {more}")


def main() -> None:
    """Measure in turns, print tables, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="directory or hub name; default: the embedded target")
    parser.add_argument("--formats", nargs="*", choices=QUANTIZATIONS, default=QUANTIZATIONS)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--products", action="store_true", help="measure products, too")
    parser.add_argument("--json", type=Path, help="also write all samples here")
    args = parser.parse_args()
    texts = [text for _, text in assets.prompts()[:NUM_TEXTS]]
    formats = [None, *args.formats]
    model = args.model or str(assets.target_path())
    llms = {
        name: LLM(model, quantization=name, speculative_config=None, max_model_len=1024)
        for name in formats
    }
    perplexities = {name: perplexity(llm, texts) for name, llm in llms.items()}
    samples_s: dict[str | None, list[float]] = {name: [] for name in formats}
    for _ in range(args.turns):
        for name, llm in llms.items():
            samples_s[name].append(decode_s(llm, texts[0], args.tokens))
    plain_s = statistics.median(samples_s[None])
    print(f"{'weights':16} {'perplexity':>10} {'tokens/s':>9} {'speed':>6}")
    for name, samples in samples_s.items():
        median_s = statistics.median(samples)
        speeds = f"{1 / median_s:>9.1f} {plain_s / median_s:>6.2f}"
        print(f"{name or LABEL:16} {perplexities[name]:>10.3f} {speeds}")
    llms.clear()
    products = measure_products(formats, args.turns) if args.products else {}
    if products:
        print_products(products)
    if args.json:
        rows = [
            {
                "quantization": name,
                "perplexity": perplexities[name],
                "token_s": samples_s[name],
                "products": products.get(name),
            }
            for name in formats
        ]
        result = {"environment": environment() | compute(), "model": Path(model).name, "rows": rows}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
