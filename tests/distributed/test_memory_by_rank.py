"""What the plan of memory says of each rank, against sizes from the configuration."""

import json
from pathlib import Path

import pytest

from outdraft.config.engine import EngineConfig
from outdraft.engine.build import build_engine
from tests.models.checkpoints import llama
from tests.ranks import spread_models

SIZES = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16_000,
    "torch_dtype": "bfloat16",
    "architectures": ["LlamaForCausalLM"],
}


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_is_told_its_part_of_weights_and_cache(tmp_path: Path, size: int) -> None:
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
    loaded = spread_models(config, size, 1)
    built = [build_engine(config, models) for models in loaded]
    plans = [plan for _, plan in built]
    for engine, plan in built:
        layers = engine.runner.cache.layers
        cache_bytes = sum(layer.k_PSGC.nbytes + layer.v_PSGE.nbytes for layer in layers)
        assert plan.block_bytes * plan.num_blocks == cache_bytes
    alone = 2 * (2 * (1024 * 64 * (2 * 16 + 2 * 4) + 3 * 1024 * 2816) + 2 * 16_000 * 1024)
    assert [plan.target_weights for plan in plans] == pytest.approx([alone / size] * size, rel=0.05)
