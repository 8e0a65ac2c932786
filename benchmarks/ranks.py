"""What a drafted token takes on one rank and on several, beside a target that is spread over them.

A target and a drafter with random weights draft chains of fixed length. Engines with drafters of
each size are started in turn, several times. A drafted token's time is that of a step's drafting,
divided by the length. Beside it stands what `outdraft plan` says. Its machine is measured here: how
fast products of one row read weights, on a rank alone and while the others do the same; sums over
ranks; and what a layer takes that has next to no weights, on one rank and on several. Everything
else is the plan's own.

The result is JSON: `python benchmarks/ranks.py --json FILE`.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from torch._C._distributed_c10d import TCPStore  # torch.distributed does not name it

from outdraft.bench.report import compute, environment
from outdraft.core.plan import StepStats
from outdraft.core.sampling import SamplingParams
from outdraft.distributed.process_groups import join_ranks
from outdraft.engine.llm import LLM
from outdraft.kernels.choose import memory_transports
from outdraft.kernels.native.library import open_library, shared_team
from outdraft.kernels.native.linear import NativeLinear
from outdraft.kernels.native.ranks import shares_memory
from outdraft.planning.hardware import Hardware, find_hardware
from outdraft.planning.shapes import find_network
from outdraft.planning.step_time import Setup, step_time

MEMORY, SOCKETS = "memory", "sockets"
LENGTH, PROMPT_TOKENS, OUTPUT_TOKENS = 4, 16, 24
SUMS, SMALL_SUM, LARGE_SUM = 200, 1024, 1 << 20  # numbers
READINGS, READ_INPUTS, READ_BYTES = 9, 1024, 1 << 28
NARROW_LAYERS = 2, 10
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 16_384,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
NARROW: dict[str, Any] = CONFIG | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result here")
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8, help="of the drafter; the target has 2")
    parser.add_argument("--requests", default="1,4")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--transport", choices=[MEMORY, SOCKETS], help="of ranks; default: what an engine takes"
    )
    args = parser.parse_args()
    size = args.tensor_parallel_size
    sizes = [d for d in range(1, size + 1) if size % d == 0]
    machine, transport = measured_machine(size, args.transport)
    if args.transport not in (None, transport):
        raise SystemExit(f"ranks exchange through {transport} on this machine")
    with tempfile.TemporaryDirectory() as name, over(transport):
        folder = Path(name)
        target = checkpoint(folder / "target", CONFIG, 2)
        drafter = checkpoint(folder / "drafter", CONFIG, args.layers)
        narrow = [checkpoint(folder / f"narrow-{n}", NARROW, n) for n in NARROW_LAYERS]
        numbers = [int(number) for number in args.requests.split(",")]
        times_ms = {(number, d): list[float]() for number in numbers for d in sizes}
        layers_us = {d: list[float]() for d in sizes}
        for _ in range(args.rounds):
            for d in sizes:  # one after the other: each engine's ranks want cores of their own
                for number, found_ms in drafted_token_ms(target, drafter, d, size, numbers):
                    times_ms[number, d].append(found_ms)
                layers_us[d].append(narrow_layer_us(target, narrow, d, size))
        setup = Setup(
            target=find_network(str(target)),
            method="draft_model",
            drafter=find_network(str(drafter)),
            hardware=machine,
            tp=size,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=OUTPUT_TOKENS,
        )
    layer_us = {d: statistics.median(samples) for d, samples in layers_us.items()}
    cells = [
        {
            "requests": number,
            "draft_tensor_parallel_size": d,
            "ms_per_drafted_token": statistics.median(samples),
            "planned_ms_per_drafted_token": planned_ms(setup, d, number, layer_us[d]),
            "samples_ms": samples,
        }
        for (number, d), samples in times_ms.items()
    ]
    result = {
        "environment": environment() | compute(),
        "options": {key: str(value) for key, value in vars(args).items()},
        "transport": transport,
        "measured": {
            "lone_rank_gb_s": machine.bytes_per_s(1) / 1e9,
            "rank_gb_s": machine.bytes_per_s(size) / 1e9,
            "sum_us": machine.link_latency_s * 1e6,
            "link_gb_s": machine.link_bandwidth / 1e9,
            "layer_us": layer_us,
        },
        "cells": cells,
    }
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


def over(transport: str) -> AbstractContextManager[object]:
    """Where engines exchange through this: over sockets if one rank cannot share memory."""
    if transport == MEMORY:
        return nullcontext()
    return mock.patch("outdraft.ranks.processes.memory_transports", return_value=None)


def checkpoint(folder: Path, sizes: dict[str, Any], num_layers: int) -> Path:
    """A random model: a drafter is wrong nearly always, so each step drafts behind one token."""
    folder.mkdir()
    config = sizes | {"num_hidden_layers": num_layers}
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(num_layers)
    size, inner, vocab = (sizes[one] for one in ("hidden_size", "intermediate_size", "vocab_size"))
    kv_size = sizes["num_key_value_heads"] * sizes["head_dim"]
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocab, size),
        "model.norm.weight": (size,),
        "lm_head.weight": (vocab, size),
    }
    for layer in range(num_layers):
        parts = {
            "input_layernorm": (size,),
            "post_attention_layernorm": (size,),
            "self_attn.q_proj": (size, size),
            "self_attn.k_proj": (kv_size, size),
            "self_attn.v_proj": (kv_size, size),
            "self_attn.o_proj": (size, size),
            "mlp.gate_proj": (inner, size),
            "mlp.up_proj": (inner, size),
            "mlp.down_proj": (size, inner),
        }
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in parts.items()}
    tensors = {
        name: torch.randn(shape, generator=generator).mul_(0.02).bfloat16()
        if len(shape) > 1
        else torch.ones(shape, dtype=torch.bfloat16)
        for name, shape in shapes.items()
    }
    save_file(tensors, folder / "model.safetensors")
    return folder


def drafted_token_ms(
    target: Path, drafter: Path, draft_size: int, size: int, numbers: Sequence[int]
) -> list[tuple[int, float]]:
    """Numbers of requests, and what a drafted token takes then."""
    with closing(engine(target, drafter, size, draft_size)) as llm:
        return [(number, median_ms(llm, number)) for number in numbers]


def narrow_layer_us(target: Path, narrow: Sequence[Path], draft_size: int, size: int) -> float:
    """What each further layer of a network with next to no weights takes, sums included."""
    few_ms, many_ms = (drafted_token_ms(target, one, draft_size, size, [1])[0][1] for one in narrow)
    return 1e3 * (many_ms - few_ms) / (NARROW_LAYERS[1] - NARROW_LAYERS[0])


def engine(target: Path, drafter: Path, size: int, draft_size: int) -> LLM:
    return LLM(
        str(target),
        tensor_parallel_size=size,
        speculative_config={
            "method": "draft_model",
            "model": str(drafter),
            "num_speculative_tokens": LENGTH,
            "draft_tensor_parallel_size": draft_size,
            "control": "fixed",
        },
        num_blocks=256,
        max_num_seqs=16,
        max_num_batched_tokens=512,
    )


def median_ms(llm: LLM, num_requests: int) -> float:
    """The median over the steps that only decode."""
    times_s: list[float] = []

    def see(stats: StepStats) -> None:
        if stats.num_draft_tokens == LENGTH * num_requests:
            times_s.append(stats.times.draft_s / LENGTH)

    llm.engine.on_step = see
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    prompts = [
        [(request * 31 + place) % CONFIG["vocab_size"] for place in range(PROMPT_TOKENS)]
        for request in range(num_requests)
    ]
    llm.generate(prompts, params, use_tqdm=False)
    llm.engine.on_step = None
    return 1e3 * statistics.median(times_s)


@dataclass(frozen=True, slots=True)
class Rates:
    """What a rank found: through what it exchanges; bytes a second that it reads alone, and while
    all ranks read; seconds of a small sum over all ranks, and of a large one."""

    transport: str
    lone_rank: float
    rank: float
    small_sum_s: float
    large_sum_s: float


def measured_machine(size: int, transport: str | None) -> tuple[Hardware, str]:
    """A card for each rank, with the memory and the sums that they share; their transport."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    store = TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    others = [
        context.Process(target=measure_rank, args=(rank, size, store.port, transport, results))
        for rank in range(size)
    ]
    for process in others:
        process.start()
    rates: Rates = results.get(timeout=120)
    for process in others:
        process.join()
    card = find_hardware("laptop")
    reached = card.bandwidth_efficiency  # the plan multiplies with it
    num_bytes = 2 * (size - 1) / size * LARGE_SUM * 2  # as `all_reduce_s` counts them
    slope_s = max(rates.large_sum_s - rates.small_sum_s, 1e-9)
    machine = replace(
        card,
        bandwidth=rates.lone_rank / reached,
        num_cards=size,
        link="measured",
        link_bandwidth=num_bytes / slope_s,
        link_latency_s=rates.small_sum_s,
        shared_bandwidth=size * rates.rank / reached,
    )
    return machine, rates.transport


def measure_rank(rank: int, size: int, port: int, transport: str | None, results: Any) -> None:
    """Rank 0 puts its `Rates`."""
    num_threads = max(1, (os.cpu_count() or 1) // size)
    torch.set_num_threads(num_threads)
    store = TCPStore("127.0.0.1", port, None, is_master=False)
    cpu = torch.device("cpu")
    over_memory = None if transport == SOCKETS else memory_transports()
    group = join_ranks(store, rank, size, size, cpu, 60.0, over_memory).target
    library = open_library()
    if library is None:
        raise SystemExit("there is no compiled library here: run `make lib` first")
    team = shared_team(library, num_threads)
    weights = torch.ones(READ_BYTES // 2 // READ_INPUTS, READ_INPUTS, dtype=torch.bfloat16)
    product, row = NativeLinear(team).pack_linear(weights, None), weights[:1].clone()
    del weights

    def median_s(work: Callable[[], object], repeats: int) -> float:
        """What some work takes that all ranks begin together, each time."""
        times_s: list[float] = []
        for _ in range(repeats):
            group.sum(torch.ones(1))
            started_s = time.perf_counter()
            work()
            times_s.append(time.perf_counter() - started_s)
        return statistics.median(times_s)

    def summed(count: int) -> Callable[[], object]:
        return lambda: group.sum(torch.ones(count, dtype=torch.bfloat16))

    # The others wait in a message meanwhile, as ranks do that do not draft.
    lone_s = median_s((lambda: product(row)) if rank == 0 else lambda: None, READINGS)
    rates = Rates(
        MEMORY if shares_memory(group) else SOCKETS,
        READ_BYTES / lone_s,
        READ_BYTES / median_s(lambda: product(row), READINGS),
        median_s(summed(SMALL_SUM), SUMS),
        median_s(summed(LARGE_SUM), SUMS // 10),
    )
    if rank == 0:
        results.put(rates)


def planned_ms(setup: Setup, draft_size: int, num_requests: int, layer_us: float) -> float:
    """`layer_us`: sums included, which the plan adds itself."""
    machine = setup.hardware
    if draft_size > 1:
        layer_us -= 2e6 * machine.all_reduce_s(0, draft_size)
    machine = replace(machine, layer_us=max(0.0, layer_us))
    setup = replace(setup, hardware=machine, draft_tp=draft_size)
    return 1e3 * step_time(setup, num_requests, LENGTH, 1.0).drafting_s / LENGTH


if __name__ == "__main__":
    main()
