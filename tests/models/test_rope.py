"""Contexts that were stretched, and heads that turn in part, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Phi3Config, Phi3ForCausalLM, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from outdraft.core.errors import ConfigError
from outdraft.kernels.torch.pointwise import rms_norm
from outdraft.kernels.torch.table import reference_kernels
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.config import ModelConfig, read_rope
from outdraft.models.decoder.layers import attention_factor, frequencies, rotary_order
from outdraft.models.decoder.loader import load_model
from tests.models.checkpoints import (
    LINEAR,
    TINY,
    YARN,
    chunked_logits,
    llama,
    qwen3,
    random_tokens,
    randomised,
    save,
)
from tests.models.test_native_forward import assert_layers_are_computed

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
HEAD_SIZE = 16
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "factor": 3.0,
    "original_max_position_embeddings": 32,
}
CHUNKS = {20: [1, 17, 2], 30: [1, 27, 2], 53: [1, 20, 3, 1, 28]}


def longrope(num_frequencies: int) -> dict[str, Any]:
    """Each frequency is divided by another number."""
    short = [1 + 0.1 * i for i in range(num_frequencies)]
    return LONGROPE | {"short_factor": short, "long_factor": [3 * one for one in short]}


@pytest.mark.parametrize("turned", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("context_len", [20, 32, 53, 96])
@pytest.mark.parametrize("kind", ["linear", "yarn", "dynamic", "longrope"])
def test_frequencies_are_those_of_transformers_for_a_text_as_long_as_the_context(
    kind, context_len, turned
):
    scalings = {"linear": LINEAR, "yarn": YARN, "dynamic": DYNAMIC}
    scaling = scalings.get(kind) or longrope(int(64 * turned) // 2)
    parameters = scaling | {"partial_rotary_factor": turned}
    max_positions = 24 if kind == "dynamic" else 96
    theirs = LlamaConfig(
        **TINY
        | {"head_dim": 64, "max_position_embeddings": max_positions, "rope_parameters": parameters}
    )
    theirs.architectures = ["LlamaForCausalLM"]
    want_F, want_factor = ROPE_INIT_FUNCTIONS[kind](theirs, "cpu", seq_len=context_len)

    rope = ModelConfig.from_mapping(theirs.to_dict()).for_context(context_len).rope

    torch.testing.assert_close(frequencies(rope, 64), want_F, rtol=1e-5, atol=0)
    assert attention_factor(rope) == pytest.approx(want_factor, rel=1e-12)


def test_the_older_place_of_the_trained_length_is_read():
    raw = LlamaConfig(**TINY).to_dict() | {
        "architectures": ["LlamaForCausalLM"],
        "rope_parameters": None,
        "original_max_position_embeddings": 32,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        },
    }
    rope = ModelConfig.from_mapping(raw).rope
    assert (rope.original_max_len, rope.factor, rope.context_len) == (32, 3.0, 96)


def stretched(kind: str) -> PreTrainedModel:
    if kind == "dynamic":
        return llama(max_position_embeddings=24, rope_parameters=dict(DYNAMIC))
    return llama(head_dim=HEAD_SIZE, rope_parameters=longrope(HEAD_SIZE // 2))


@pytest.mark.parametrize(("num_tokens", "max_model_len"), [(53, 53), (20, 24), (20, 32)])
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_logits_are_those_of_transformers_where_the_text_fills_the_context(
    kind, num_tokens, max_model_len, tmp_path
):
    if kind == "dynamic" and max_model_len == 32:
        num_tokens = max_model_len = 30  # transformers stretches with the text beyond 24
    theirs = randomised(stretched(kind))
    ids_T = random_tokens(num_tokens)
    with torch.no_grad():
        want_TV = theirs(ids_T[None]).logits[0]
    path = save(theirs, tmp_path)

    model = load_model(path, torch.float32, "cpu", reference_kernels(), max_model_len)
    got_TV = chunked_logits(model, ids_T, CHUNKS[num_tokens])

    torch.testing.assert_close(got_TV, want_TV, rtol=1e-4, atol=1e-4)
    other = load_model(path, torch.float32, "cpu", reference_kernels(), 96)
    others_TV = chunked_logits(other, ids_T, CHUNKS[num_tokens])
    is_long_too = kind == "longrope" and max_model_len > 32
    assert torch.equal(others_TV, got_TV) == is_long_too


def test_a_dynamic_model_reads_its_factor_times_the_trained_length(tmp_path):
    path = save(randomised(stretched("dynamic")), tmp_path)
    assert ModelConfig.from_directory(path).max_model_len == 96


def partly_turned(path: Path, **rope: Any) -> PreTrainedModel:
    """transformers' Phi-3, whose heads turn in part, saved as the Llama that it is otherwise."""
    shape = TINY | {"rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5} | rope}
    theirs = randomised(Phi3ForCausalLM(Phi3Config(**shape, sliding_window=None)))
    for weight in theirs.parameters():  # and not the frequencies
        weight.data.copy_(weight.data.bfloat16())
    save(theirs, path)
    head_size = TINY["hidden_size"] // TINY["num_attention_heads"]
    kv_size = TINY["num_key_value_heads"] * head_size
    tensors: dict[str, Tensor] = {}
    for name, weight in load_file(path / "model.safetensors").items():
        if "qkv_proj" in name:
            parts = weight.split((TINY["hidden_size"], kv_size, kv_size))
            names = [name.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
        elif "gate_up_proj" in name:
            parts = weight.chunk(2)
            names = [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
        else:
            parts, names = (weight,), [name]
        tensors |= {n: part.contiguous() for n, part in zip(names, parts, strict=True)}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    raw |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    (path / "config.json").write_text(json.dumps(raw))
    return theirs


@pytest.mark.parametrize("kind", ["default", "longrope"])
def test_heads_that_turn_in_part_give_the_logits_of_transformers(kind, tmp_path):
    rope = longrope(2) if kind == "longrope" else {"rope_type": kind}
    theirs = partly_turned(tmp_path, **rope)
    ids_T = random_tokens(53)
    with torch.no_grad():
        want_TV = theirs(ids_T[None]).logits[0]
    model = load_model(tmp_path, torch.float32, "cpu", reference_kernels())
    got_TV = chunked_logits(model, ids_T, CHUNKS[53])
    torch.testing.assert_close(got_TV, want_TV, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "partial"])
def test_the_compiled_pass_agrees_with_the_layers(kind, tmp_path):
    """In float32, of weights that bfloat16 holds exactly."""
    if kind == "partial":
        partly_turned(tmp_path, rope_type="default")
    else:
        save(randomised(stretched(kind)).bfloat16(), tmp_path)
    assert_layers_are_computed(tmp_path)


def test_norms_and_biases_of_heads_are_put_in_order_too(tmp_path):
    save(randomised(qwen3(attention_bias=True)), tmp_path)
    plain = load_model(tmp_path, torch.float64, "cpu", reference_kernels())
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | {"partial_rotary_factor": 0.5}))
    model = load_model(tmp_path, torch.float64, "cpu", reference_kernels())
    order_C = rotary_order(model.config.rope, model.config.head_size)
    assert order_C is not None
    x_TD = torch.randn(3, TINY["hidden_size"], dtype=torch.float64)

    def queries_and_keys(model: CausalLM) -> Tensor:
        layer, config = model.decoder.decoder_layers[0], model.config
        spec, sizes = layer.spec(), (config.num_heads, config.num_kv_heads)
        assert spec.q_norm_C is not None
        assert spec.k_norm_C is not None
        heads_THC = spec.qkv(x_TD).unflatten(1, (-1, config.head_size))
        q, k, _ = heads_THC.split((*sizes, sizes[1]), dim=1)
        return torch.cat((rms_norm(q, spec.q_norm_C, 1e-6), rms_norm(k, spec.k_norm_C, 1e-6)), 1)

    ours_THC, plain_THC = queries_and_keys(model), queries_and_keys(plain)
    torch.testing.assert_close(ours_THC, plain_THC[..., order_C], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("linear", {"factor": 0}, "factor must be a number above 0, got 0"),
        ("linear", {"factor": "2"}, "factor must be a number above 0"),
        ("linear", {"factor": True}, "factor must be a number above 0"),
        (
            "yarn",
            {"factor": 4, "original_max_position_embeddings": "x"},
            "original_max_position_embeddings must be a positive whole number",
        ),
        ("yarn", {"factor": 4, "truncate": 1}, "truncate must be true or false"),
    ],
)
def test_numbers_of_rotary_embeddings_are_checked(kind, values, message):
    raw = {"max_position_embeddings": 64, "rope_scaling": {"rope_type": kind, **values}}
    with pytest.raises(ConfigError, match=message):
        read_rope(raw, 8)
