"""What `dtype="auto"` loads, with which kernels, and what is said of a damaged checkpoint."""

import json
from pathlib import Path

import pytest
import torch

from outdraft.config.engine import EngineConfig
from outdraft.core.errors import ConfigError
from outdraft.engine.llm import LLM
from outdraft.kernels.choose import choose_kernels, kernels_options
from outdraft.kernels.native import library
from outdraft.loading import models as loading
from outdraft.loading.models import NO_LIBRARY, check_division, choose_dtype, load_models
from tests.models.checkpoints import llama, randomised, save
from tests.models.eagle_checkpoints import LAYOUTS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("checkpoint_dtype", ["bfloat16", "float16", "float32"])
def test_auto_is_the_checkpoints_own_dtype_on_a_gpu(checkpoint_dtype: str):
    assert choose_dtype("auto", checkpoint_dtype, CUDA) is getattr(torch, checkpoint_dtype)
    assert choose_dtype("bfloat16", checkpoint_dtype, CPU) is torch.bfloat16


@pytest.mark.parametrize("kernels", kernels_options())
@pytest.mark.parametrize("checkpoint_dtype", ["bfloat16", "float16", "float32"])
def test_auto_is_float32_on_a_cpu_unless_it_multiplies_what_the_checkpoint_holds(
    checkpoint_dtype: str, kernels: str
):
    used = library.usable_instruction_sets()[-1] if kernels == "auto" else kernels
    is_bf16 = checkpoint_dtype == "bfloat16" and used.endswith(("-bf16", "-amx"))
    want = torch.bfloat16 if is_bf16 else torch.float32
    assert choose_dtype("auto", checkpoint_dtype, CPU, kernels) is want


@pytest.mark.parametrize(
    ("fits_bfloat16", "numbers"), [(True, "float32 over bfloat16 weights"), (False, "float32")]
)
def test_bfloat16_weights_stay_bfloat16_and_the_memory_plan_says_so(
    fits_bfloat16: bool, numbers: str, tmp_path: Path
):
    theirs = randomised(llama())
    save(theirs.bfloat16() if fits_bfloat16 else theirs, tmp_path)
    options = {"model": str(tmp_path), "device": "cpu", "dtype": "float32", "num_blocks": 8}

    llm = LLM.from_config(EngineConfig.from_options(**options))

    assert f"target weights: {numbers}" in dict(llm.memory.table())


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_nothing_becomes_a_graph_where_the_configuration_says_so(
    enforce_eager: bool, monkeypatch, tmp_path: Path
):
    asked = []

    def choose(option, device, dtype, *, has_graphs, activation_dtype):
        asked.append((has_graphs, activation_dtype))
        return choose_kernels(option, device, dtype, has_graphs=has_graphs)

    monkeypatch.setattr(loading, "choose_kernels", choose)
    save(randomised(llama()), tmp_path)
    load_models(EngineConfig(model=str(tmp_path), device="cpu", enforce_eager=enforce_eager))
    assert asked == [(not enforce_eager, "auto")]


def test_without_a_library_the_reference_computes_and_one_line_says_so(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    save(randomised(llama()), tmp_path)
    models = load_models(EngineConfig(model=str(tmp_path), device="cpu"))
    assert models.kernels.name == "reference"
    assert [record.message for record in caplog.records] == [NO_LIBRARY]


def test_unknown_kernels_are_refused_before_a_model_is_looked_for():
    with pytest.raises(ConfigError, match="unknown kernels 'flash'"):
        load_models(EngineConfig(model="/there/is/no/such/model", kernels="flash"))


def test_a_head_in_a_draft_models_place_is_named_before_weights_are_read(tmp_path: Path):
    save(llama(), tmp_path / "target")
    (tmp_path / "target" / "model.safetensors").write_bytes(b"")
    head = LAYOUTS["eagle"].save(tmp_path / "head")
    config = EngineConfig.from_options(
        model=str(tmp_path / "target"), speculative_config={"model": str(head)}
    )

    with pytest.raises(
        ConfigError, match=r'holds eagle, .* \{"method": "eagle", "model": \.\.\.\}'
    ):
        load_models(config)


@pytest.mark.parametrize(
    ("size", "draft_size", "message"),
    [
        (3, 1, "--tensor-parallel-size 3 does not divide .* 4 attention heads.*: choose 1, 2, 4$"),
        (4, 2, "draft_tensor_parallel_size 2 does not divide .* 3 attention heads.*: choose 1, 3$"),
    ],
)
def test_ranks_that_do_not_divide_a_network_are_refused_before_weights_are_read(
    size: int, draft_size: int, message: str, tmp_path: Path
):
    for name, heads in (("target", 4), ("drafter", 3)):
        shape = llama(num_attention_heads=heads, num_key_value_heads=1, hidden_size=24 * heads)
        save(shape, tmp_path / name)
        (tmp_path / name / "model.safetensors").unlink()

    def check(size: int, draft_size: int) -> None:
        speculative = {"model": str(tmp_path / "drafter"), "num_speculative_tokens": 2}
        speculative["draft_tensor_parallel_size"] = draft_size
        options = {"tensor_parallel_size": size, "speculative_config": speculative}
        check_division(EngineConfig.from_options(model=str(tmp_path / "target"), **options))

    with pytest.raises(ConfigError, match=message):
        check(size, draft_size)
    check(4, 1)


@pytest.mark.parametrize("broken", ["target", "drafter"])
@pytest.mark.parametrize("value", [0, 7])
def test_an_error_in_a_checkpoint_says_in_which(broken: str, value: int, tmp_path: Path):
    """0 is refused by its config.json alone, 7 does not fit its weights."""
    for name in ("target", "drafter"):
        save(randomised(llama()), tmp_path / name)
    config = tmp_path / broken / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": value}))
    options = {"model": str(tmp_path / "target"), "device": "cpu"}
    options["speculative_config"] = {"model": str(tmp_path / "drafter")}
    with pytest.raises(ConfigError, match=f"^{tmp_path / broken}: .*config.json"):
        load_models(EngineConfig.from_options(**options))
