"""What do weights in 8 and 4 bits cost in quality, and what do they gain in speed?

    python benchmarks/quantization.py [--model DIR] [--json out.json]

Perplexity is that of the embedded held-out prompts; speed is that of plain greedy decoding of one
request. The formats take turns. By default for the embedded target.
"""

import argparse
import json
import math
import statistics
import time
from pathlib import Path

from outdraft import LLM, SamplingParams, assets
from outdraft.bench.environment import compute, environment
from outdraft.core.weight_format import QUANTIZATIONS


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


def tokens_per_s(llm: LLM, text: str, num_tokens: int) -> float:
    """Speed of plain greedy decoding."""
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    start_s = time.perf_counter()
    llm.generate(text, params, use_tqdm=False)
    return num_tokens / (time.perf_counter() - start_s)


def main() -> None:
    """Measure in turns, print a table, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", help="directory or hub name; default: the embedded target")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--json", type=Path, help="also write all samples here")
    args = parser.parse_args()
    texts = [prompt.text for prompt in assets.prompts()]
    formats = [None, *QUANTIZATIONS]
    model = args.model or str(assets.target_path())
    llms = {name: LLM(model, quantization=name, speculative_config=None) for name in formats}
    perplexities = {name: perplexity(llm, texts) for name, llm in llms.items()}
    speeds: dict[str | None, list[float]] = {name: [] for name in formats}
    for _ in range(args.turns):
        for name, llm in llms.items():
            speeds[name].append(tokens_per_s(llm, texts[0], args.tokens))
    plain = statistics.median(speeds[None])
    print(f"{'weights':16} {'perplexity':>10} {'tokens/s':>9} {'speed':>6}")
    for name, samples in speeds.items():
        speed = statistics.median(samples)
        label = name or "as they are"
        print(f"{label:16} {perplexities[name]:>10.3f} {speed:>9.1f} {speed / plain:>6.2f}")
    if args.json:
        rows = [
            {"quantization": name, "perplexity": perplexities[name], "tokens_per_s": speeds[name]}
            for name in formats
        ]
        result = {"environment": environment() | compute(), "model": model, "rows": rows}
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
