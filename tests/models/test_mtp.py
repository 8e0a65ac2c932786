"""Layers for multi-token prediction against whole texts without a cache, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from outdraft.core.errors import ConfigError
from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels
from outdraft.models.base import StateNetwork
from outdraft.models.choose import load_language_model
from outdraft.models.drafters.eagle import EagleNetwork, load_mtp
from outdraft.models.drafters.tables import TargetTables
from outdraft.models.library.loader import read_config
from tests.kernels.tables import cpu_kernels
from tests.models.checkpoints import TINY, are_bfloat16, qwen2, randomised, save
from tests.models.families import randomised_family
from tests.models.mtp_checkpoints import (
    FIELD,
    MELLUM_NAMES,
    MELLUM_PREFIX,
    MIMO_PREFIX,
    add_library_layer,
    add_mimo_layer,
    library_prefix,
)
from tests.models.quantized.families import EXPERTS, save_family
from tests.models.quantized.writers import fp8
from tests.models.test_eagle import CHUNKS, Drive
from tests.reference import mtp as reference

NUM_TOKENS, NUM_STEPS, EPS = sum(CHUNKS), 4, 1e-6
LAYOUTS = ("mimo", "deepseek-v3", "glm-4-moe", "mellum")


def checkpoint(layout: str, folder: Path) -> Path:
    if layout == "mimo":
        model = randomised(qwen2())
        for weight in model.parameters():
            weight.data = weight.data.bfloat16().float()
        return add_mimo_layer(save(model, folder / "target"))
    return add_library_layer(save(randomised_family(layout), folder / "target"))


def load(
    path: Path, kernels: Kernels | None = None, dtype: torch.dtype = torch.float64
) -> StateNetwork:
    kernels = kernels or reference_kernels()
    return load_mtp(path, TargetTables(load_language_model(path, dtype, "cpu", kernels)))


Reference = Callable[[Tensor, Tensor], Tensor]


def reference_of(layout: str, path: Path) -> tuple[Reference, Tensor]:
    """From tokens and the states before them to states; the head."""
    tensors = {k: v.double() for k, v in load_file(path / "model.safetensors").items()}
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    if layout == "mimo":
        own = _without(MIMO_PREFIX, tensors)
        settings = reference.Settings(4, 2, TINY["hidden_size"] // 4, 10000.0, EPS)
        return lambda *rows: reference.mimo_states(own, settings, embedding, *rows), head
    own = _without(library_prefix(path), tensors)
    if layout == "mellum":
        own = {name: own[other] for name, other in MELLUM_NAMES.items()}
    layer = _as_an_ordinary_layer(path)
    return lambda *rows: reference.deepseek_states(own, EPS, layer, embedding, *rows), head


def _without(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: tensor for name, tensor in tensors.items() if name.startswith(prefix)}
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def _as_an_ordinary_layer(path: Path) -> Callable[[Tensor], Tensor]:
    """The decoder layer inside, loaded by the library as the last layer of a longer model."""
    config, tensors = read_config(path), load_file(path / "model.safetensors")
    last = f"model.layers.{config.num_hidden_layers}."
    config.num_hidden_layers += 1
    window = None
    if config.model_type == "mellum":
        config.layer_types.append("sliding_attention")
        config.mlp_layer_types.append("sparse")
        window = config.sliding_window
    renamed = {name.replace("mtp.layers.0.", last): x for name, x in tensors.items()}
    folder = path.parent / "longer"
    folder.mkdir(exist_ok=True)
    config.save_pretrained(folder)
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    kind: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model = kind.from_pretrained(folder, config=config, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    base: Any = model.model
    types = {} if window is None else {"layer_type": "sliding_attention"}

    def run(hidden_TD: Tensor) -> Tensor:
        num_rows = len(hidden_TD)
        positions = torch.arange(num_rows)
        gaps = positions[:, None] - positions
        hidden = (gaps < 0) | (gaps >= (window or num_rows))
        mask = torch.zeros(num_rows, num_rows).double().masked_fill(hidden, -torch.inf)
        with torch.no_grad():
            return base.layers[-1](
                hidden_TD[None],
                attention_mask=mask[None, None],
                position_ids=positions[None],
                position_embeddings=base.rotary_emb(hidden_TD[None], positions[None], **types),
            )[0]

    return run


def check_against_reference(
    layout: str, path: Path, network: StateNetwork, tolerance: float
) -> None:
    """A text in chunks, then a greedy chain whose states stand in for the target's."""
    compute, head = reference_of(layout, path)
    generator = torch.Generator().manual_seed(0)
    ids_T = torch.randint(0, TINY["vocab_size"], (NUM_TOKENS,), generator=generator)
    inputs_TD = torch.randn(NUM_TOKENS, TINY["hidden_size"], generator=generator).double()
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    drive = Drive(network)
    features_TD = network.features(inputs_TD, inputs_TD.new_empty(NUM_TOKENS, 0, 1))
    got_TD = drive.read_chunks(ids_T, features_TD, CHUNKS)
    for _ in range(NUM_STEPS):
        want_TD = compute(ids_T, inputs_TD)
        torch.testing.assert_close(got_TD, want_TD[-len(got_TD) :], **close)
        got_TV, want_TV = network.logits(got_TD), want_TD[-len(got_TD) :] @ head.T
        torch.testing.assert_close(got_TV, want_TV, **close)
        best_T = got_TV.argmax(-1)
        assert torch.equal(best_T, want_TV.argmax(-1))
        ids_T = torch.cat([ids_T, best_T[-1:]])
        inputs_TD = torch.cat([inputs_TD, want_TD[-1:]])
        got_TD = drive.read(best_T[-1:], got_TD[-1:])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_texts_and_drafts_equal_those_of_whole_sequences(layout: str, tmp_path: Path):
    path = checkpoint(layout, tmp_path)
    # The library's norms and angles are of float32, whatever the model is of.
    check_against_reference(layout, path, load(path), 1e-9 if layout == "mimo" else 1e-4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_packed_layer_on_the_cpu_computes_the_same(layout: str, tmp_path: Path):
    path = checkpoint(layout, tmp_path)
    network = load(path, cpu_kernels(), torch.float32)
    check_against_reference(layout, path, network, 1e-4)
    if layout == "mimo":
        assert isinstance(network, EagleNetwork)
        assert are_bfloat16(network)


@pytest.mark.parametrize("kernels", [reference_kernels, cpu_kernels])
def test_mimo_does_not_read_the_token_at_position_0(kernels: Callable[[], Kernels], tmp_path: Path):
    network = load(checkpoint("mimo", tmp_path), kernels(), torch.float32)
    states_TD = torch.randn(3, TINY["hidden_size"], generator=torch.Generator().manual_seed(4))
    texts = [torch.tensor(ids) for ids in ([5, 6, 7], [9, 6, 7], [5, 9, 7])]
    first, other_first, other_second = (Drive(network).read(ids, states_TD) for ids in texts)
    assert torch.equal(first, other_first)
    assert not torch.equal(first[1:], other_second[1:])


def test_bytes_are_those_of_the_layer_and_of_what_one_step_reads(tmp_path: Path):
    path = checkpoint("mimo", tmp_path)
    tensors = load_file(path / "model.safetensors")
    own = [tensor for name, tensor in tensors.items() if name.startswith(MIMO_PREFIX)]
    network, num_own = load(path), sum(tensor.numel() for tensor in own)
    assert network.memory_bytes == 8 * num_own
    assert network.weight_bytes == 8 * (num_own + tensors["lm_head.weight"].numel())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_target_is_the_same_without_the_layer(layout: str, tmp_path: Path):
    path = checkpoint(layout, tmp_path)
    model = load_language_model(path, torch.float32, "cpu", cpu_kernels())
    tensors = load_file(path / "model.safetensors")
    rewrite(path, lambda found: [found.pop(name) for name in tensors if _drafts(name)])
    assert (
        model.memory_bytes
        == load_language_model(path, torch.float32, "cpu", cpu_kernels()).memory_bytes
    )


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [None, 0])
def test_a_checkpoint_without_such_layers_is_refused(
    layout: str, value: int | None, tmp_path: Path
):
    path = checkpoint(layout, tmp_path)
    written = json.loads((path / "config.json").read_text())
    del written[FIELD]
    (path / "config.json").write_text(
        json.dumps(written if value is None else {**written, FIELD: value})
    )
    rewrite(path, lambda tensors: [tensors.pop(x) for x in list(tensors) if _drafts(x)])
    with pytest.raises(ConfigError, match=f"method 'mtp' needs a checkpoint .* {FIELD}"):
        load(path)


def _drafts(name: str) -> bool:
    of_published = f"model.layers.{TINY['num_hidden_layers']}."
    return name.startswith((MIMO_PREFIX, of_published, MELLUM_PREFIX))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_missing_tensor_is_named(layout: str, tmp_path: Path):
    path = checkpoint(layout, tmp_path)
    rewrite(
        path, lambda x: [x.pop(n) for n in list(x) if _drafts(n) and n.endswith("o_proj.weight")]
    )
    with pytest.raises(ConfigError, match=r"self_attn\.o_proj\.weight"):
        load(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_field_without_tensors_is_told(layout: str, tmp_path: Path):
    path = checkpoint(layout, tmp_path)
    rewrite(path, lambda tensors: [tensors.pop(x) for x in list(tensors) if _drafts(x)])
    with pytest.raises(ConfigError, match=f"names {FIELD}, but it has no tensors"):
        load(path)


def test_a_family_whose_layers_are_not_known_is_refused(tmp_path: Path):
    path = save(randomised(qwen2()), tmp_path / "target")
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | {FIELD: 1}))
    with pytest.raises(ConfigError, match="Qwen2ForCausalLM has no MTP layers that outdraft knows"):
        load(path)


def test_quantised_layers_are_left_out_of_the_target_and_refused_by_the_drafter(tmp_path: Path):
    """The fourth of four quantised layers is named one for multi-token prediction."""
    changes = EXPERTS | {"q_lora_rank": 32, "kv_lora_rank": 32, "num_hidden_layers": 4}
    save_family("deepseek-v3", tmp_path, fp8((32, 32)), rounds=True, **changes)
    written = json.loads((tmp_path / "config.json").read_text())
    written |= {"num_hidden_layers": 3, FIELD: 1}
    (tmp_path / "config.json").write_text(json.dumps(written))
    kernels = cpu_kernels()
    target = load_language_model(tmp_path, torch.float32, "cpu", kernels)
    assert target.config.num_layers == 3
    with pytest.raises(ConfigError, match=r"MTP layers of .* are quantised"):
        load_mtp(tmp_path, TargetTables(target))
