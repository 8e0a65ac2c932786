"""What drafts bring on a GPU: `python benchmarks/gpu.py --json FILE`.

The pairs have random weights, in the shapes of two Qwen3 models, made as those of
`peers/make_big.py`: the drafter is the target's own first layers, and later layers write with a
small gain, so that drafts are often right. That is made by construction: the pair shows what the
same drafts cost here. Engines of a pair share the target and take turns in rounds.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from outdraft import assets
from outdraft.bench.environment import compute, environment
from outdraft.bench.side_by_side import share_target
from outdraft.config.engine import EngineConfig
from outdraft.core.sampling import SamplingParams
from outdraft.engine.llm import LLM

SCALE, LATER_GAIN, SEED = 0.04, 0.025, 20261126
NUM_BLOCKS = 4096  # of each engine's cache
VOCABULARY = 32768  # of a size that a head has on a GPU; the tokenizer knows the first ones
WARM_ROUNDS, PROFILED_TOKENS = 3, 24


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of a target, and how many of its layers draft."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    drafter_layers: int

    def config(self, num_layers: int) -> dict[str, Any]:
        """config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "hidden_act": "silu",
            "vocab_size": VOCABULARY,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": num_layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": 4096,
            "attention_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "torch_dtype": "bfloat16",
        }


SIZES = {"0.6b": Size(1024, 3072, 28, 16, 2), "8b": Size(4096, 12288, 36, 32, 3)}


def main() -> None:
    args = _arguments()
    kept = {name: value for name, value in vars(args).items() if name not in ("json", "folder")}
    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "environment": environment() | compute(),
        "options": kept,
    }
    for name in args.sizes:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            paths = make_pair(SIZES[name], Path(folder))
            for found in _measured(paths, args):
                results[name] = found
                if args.json:
                    written = json.dumps(results, indent=1) + "\n"
                    args.json.write_text(written, encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--folder", type=Path, help="for weights, until they are measured")
    parser.add_argument("--sizes", nargs="+", choices=tuple(SIZES), default=["0.6b", "8b"])
    parser.add_argument("--drafts", nargs="+", default=["4", "auto"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--enforce-eager", action="store_true", help="no step is a graph")
    return parser.parse_args()


def make_pair(size: Size, folder: Path) -> tuple[Path, Path]:
    """Target and drafter, written as checkpoints."""
    torch.manual_seed(SEED)

    def normal(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        drawn = torch.randn(rows, columns, device="cuda", dtype=torch.float32)
        return (drawn * (SCALE * (1024 / size.hidden) ** 0.5 * gain)).bfloat16().cpu()

    def ones(count: int) -> Tensor:
        return torch.ones(count, dtype=torch.bfloat16)

    weights = {"model.embed_tokens.weight": normal(VOCABULARY, size.hidden)}
    for layer in range(size.layers):
        gain = 1.0 if layer < size.drafter_layers else LATER_GAIN
        parts = {
            "input_layernorm": ones(size.hidden),
            "self_attn.q_proj": normal(size.heads * 128, size.hidden),
            "self_attn.k_proj": normal(8 * 128, size.hidden),
            "self_attn.v_proj": normal(8 * 128, size.hidden),
            "self_attn.o_proj": normal(size.hidden, size.heads * 128, gain),
            "self_attn.q_norm": ones(128),
            "self_attn.k_norm": ones(128),
            "post_attention_layernorm": ones(size.hidden),
            "mlp.gate_proj": normal(size.intermediate, size.hidden),
            "mlp.up_proj": normal(size.intermediate, size.hidden),
            "mlp.down_proj": normal(size.hidden, size.intermediate, gain),
        }
        weights |= {f"model.layers.{layer}.{name}.weight": part for name, part in parts.items()}
    weights["model.norm.weight"] = ones(size.hidden)
    paths = folder / "target", folder / "drafter"
    for path, num_layers in zip(paths, (size.layers, size.drafter_layers), strict=True):
        path.mkdir()
        left_out = tuple(f"model.layers.{layer}." for layer in range(num_layers, size.layers))
        kept = {name: one for name, one in weights.items() if not name.startswith(left_out)}
        save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(size.config(num_layers)), encoding="utf-8")
        tokenizer = (assets.target_path() / "tokenizer.json").read_text(encoding="utf-8")
        (path / "tokenizer.json").write_text(_padded(tokenizer), encoding="utf-8")
    return paths


def _padded(tokenizer: str) -> str:
    """The tokenizer with a name for every token of the vocabulary."""
    parsed = json.loads(tokenizer)
    vocabulary = parsed["model"]["vocab"]
    for token_id in range(len(vocabulary), VOCABULARY):
        vocabulary[f"unused{token_id}"] = token_id
    return json.dumps(parsed)


def _measured(paths: tuple[Path, Path], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Tokens a second of each engine, and for the fewest requests what its steps launch; as far as
    it is measured."""
    llms = _engines(paths, args)
    prompts = [entry.text[-1500:] for entry in assets.prompts()[: max(args.requests)]]
    found: dict[str, Any] = {"steps": {}, "medians": {}, "rounds": {}}
    for temperature in args.temperatures:
        for number in args.requests:
            params = SamplingParams(
                temperature=temperature, max_tokens=args.max_tokens, ignore_eos=True
            )
            for llm in llms.values():
                for _ in range(WARM_ROUNDS):  # what comes again becomes a graph
                    _run(llm, prompts[:number], params)
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
            for _ in range(args.rounds):
                for name, llm in llms.items():
                    samples[name].append(_run(llm, prompts[:number], params))
            key = f"temperature {temperature:g}, {number} requests"
            found["rounds"][key] = samples
            found["medians"][key] = {name: _medians(rounds) for name, rounds in samples.items()}
            _show(key, found["medians"][key])
            if number == min(args.requests):
                for name, llm in llms.items():
                    steps = _profile(llm, prompts[:number], temperature)
                    found["steps"][f"{key}, {name}"] = steps
                    print("  ", name, steps, flush=True)
            yield found


def _engines(paths: tuple[Path, Path], args: argparse.Namespace) -> dict[str, LLM]:
    target, drafter = paths
    configs: dict[str, EngineConfig] = {}
    for drafts in ("0", *args.drafts):
        speculative: dict[str, Any] | None = None
        if drafts != "0":
            speculative = {"method": "draft_model", "model": str(drafter)}
            speculative |= {"num_speculative_tokens": drafts if drafts == "auto" else int(drafts)}
            if drafts != "auto":
                speculative["control"] = "fixed"
        configs["plain" if drafts == "0" else drafts] = EngineConfig.from_options(
            model=str(target),
            device="cuda",
            speculative_config=speculative,
            enforce_eager=args.enforce_eager,
            num_blocks=NUM_BLOCKS,
        )
    models = share_target(configs)
    return {name: LLM.from_config(configs[name], models[name]) for name in configs}


def _run(llm: LLM, prompts: Sequence[str], params: SamplingParams) -> dict[str, float]:
    """Tokens a second, prompts in the cache included, and tokens of a step."""
    before = llm.engine.stats.num_steps
    started = time.perf_counter()
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    seconds = time.perf_counter() - started
    num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    steps = llm.engine.stats.num_steps - before
    return {"tokens_per_s": num_tokens / seconds, "steps": steps, "step_ms": 1000 * seconds / steps}


def _medians(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {what: statistics.median(one[what] for one in rounds) for what in rounds[0]}


def _show(key: str, medians: Mapping[str, Mapping[str, float]]) -> None:
    plain = medians["plain"]["tokens_per_s"]
    print(key, flush=True)
    for name, one in medians.items():
        ratio = one["tokens_per_s"] / plain
        print(f"  {name:6} {one['tokens_per_s']:9.1f} tokens/s {ratio:5.2f} {one}", flush=True)


def _profile(llm: LLM, prompts: Sequence[str], temperature: float) -> dict[str, float]:
    """How many kernels a step has on average, what is launched for them, and the time they take."""
    params = SamplingParams(temperature=temperature, max_tokens=PROFILED_TOKENS, ignore_eos=True)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        steps = _run(llm, prompts, params)["steps"]
        torch.cuda.synchronize()
    launches = kernels = busy = 0.0
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            kernels += 1
            busy += event.device_time
        elif event.name.startswith(("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")):
            launches += 1
    return {
        "launches": launches / steps,
        "kernels": kernels / steps,
        "kernel_ms": busy / 1000 / steps,
    }


if __name__ == "__main__":
    main()
