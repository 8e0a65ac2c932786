"""What the plan of memory says of each rank, against what the process takes."""

import ctypes
import gc
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from outdraft.config.engine import EngineConfig
from outdraft.engine.build import build_engine
from outdraft.engine.memory import MemoryPlan
from outdraft.kv.cache import KVCache
from tests.models.checkpoints import llama
from tests.ranks import spread_models

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16_000,
    "torch_dtype": "bfloat16",
    "architectures": ["LlamaForCausalLM"],
}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="trims memory with a function of glibc")
@pytest.mark.parametrize("size", [2, 4])
def test_weights_and_cache_of_all_ranks_are_within_5_percent_of_what_is_told(
    tmp_path: Path, size: int
) -> None:
    written = llama().config.to_dict() | SIZES
    (tmp_path / "config.json").write_text(json.dumps(written))
    config = EngineConfig.from_options(
        model=str(tmp_path),
        load_format="dummy",
        dtype="bfloat16",
        device="cpu",
        num_blocks=800,
        max_num_seqs=2,
        max_num_batched_tokens=16,
    )
    spread_models(config, size, 1)  # what the first model of a process takes stays
    before = resident_bytes()
    loaded = spread_models(config, size, 1)
    built = [build_engine(config, models) for models in loaded]
    for engine, _ in built:
        touch([engine.runner.cache])
    taken = resident_bytes() - before
    plans = [plan for _, plan in built]
    told = sum(map(weights_and_cache, plans))
    assert taken == pytest.approx(told, rel=0.05)
    alone = 2 * (6 * (1024 * 64 * (2 * 16 + 2 * 4) + 3 * 1024 * 2816) + 2 * 16_000 * 1024)
    assert [plan.target_weights for plan in plans] == pytest.approx([alone / size] * size, rel=0.05)


def weights_and_cache(plan: MemoryPlan) -> int:
    return plan.target_weights + plan.drafter_weights + plan.block_bytes * plan.num_blocks


def touch(caches: Sequence[KVCache]) -> None:
    """Memory that nobody wrote to is not there yet."""
    for cache in caches:
        for layer in cache.layers:
            layer.k_PSGC.fill_(1)
            layer.v_PSGC.fill_(1)


def resident_bytes() -> int:
    """Without what the allocator keeps of temporaries."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return psutil.Process().memory_info().rss
