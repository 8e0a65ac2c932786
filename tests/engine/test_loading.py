"""What `dtype="auto"` loads."""

from pathlib import Path

import pytest
import torch

from outdraft.config.engine import EngineConfig
from outdraft.engine.llm import LLM
from outdraft.engine.loading import choose_dtype
from tests.models.checkpoints import llama, randomised, save

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("checkpoint_dtype", ["bfloat16", "float16", "float32"])
def test_auto_is_float32_on_a_cpu_and_the_checkpoints_own_on_a_gpu(checkpoint_dtype: str):
    assert choose_dtype("auto", checkpoint_dtype, CPU) is torch.float32
    assert choose_dtype("auto", checkpoint_dtype, CUDA) is getattr(torch, checkpoint_dtype)
    assert choose_dtype("bfloat16", checkpoint_dtype, CPU) is torch.bfloat16


@pytest.mark.parametrize(
    ("fits_bfloat16", "numbers"), [(True, "float32 over bfloat16 weights"), (False, "float32")]
)
def test_bfloat16_weights_stay_bfloat16_and_the_memory_plan_says_so(
    fits_bfloat16: bool, numbers: str, tmp_path: Path
):
    theirs = randomised(llama())
    save(theirs.bfloat16() if fits_bfloat16 else theirs, tmp_path)
    config = EngineConfig.from_options(model=str(tmp_path), device="cpu", num_blocks=8)

    llm = LLM.from_config(config)

    assert llm.models.target.dtype is torch.float32
    assert f"target weights: {numbers}" in dict(llm.memory.table())
