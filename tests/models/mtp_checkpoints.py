"""Layers for multi-token prediction in tiny checkpoints, under the names that are published."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

MIMO_PREFIX = "model.mtp_layers.0."
MELLUM_PREFIX = "mtp."
MELLUM_NAMES = {
    "enorm.weight": "pre_fc_norm_embedding.weight",
    "hnorm.weight": "pre_fc_norm_hidden.weight",
    "eh_proj.weight": "fc.weight",
    "shared_head.norm.weight": "norm.weight",
}
FIELD = "num_nextn_predict_layers"
_COPIED = ("input_layernorm", "self_attn.", "mlp.", "post_attention_layernorm")


def add_mimo_layer(path: Path, seed: int = 3) -> Path:
    """A checkpoint of Qwen 2 becomes one of MiMo-7B; the network in front stays as it is."""
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    size = tensors["model.norm.weight"].numel()
    layer = _like_the_last_layer(tensors, _num_layers(path), generator)
    layer |= {
        f"{name}.weight": _norm(size, generator)
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm")
    }
    layer["input_proj.weight"] = _weight((size, 2 * size), generator)
    tensors |= {MIMO_PREFIX + name: tensor for name, tensor in layer.items()}
    _write(path, tensors, {"architectures": ["MiMoForCausalLM"], "model_type": "mimo"})
    return path


def add_library_layer(path: Path, seed: int = 3) -> Path:
    """To a checkpoint of a family that has such layers: as DeepSeek-V3 and GLM-4.5 have it, with
    copies of the embedding and the head, or as Qwen3-Next and Mellum."""
    tensors, generator = load_file(path / "model.safetensors"), torch.Generator().manual_seed(seed)
    size, prefix = tensors["model.norm.weight"].numel(), library_prefix(path)
    layer = _like_the_last_layer(tensors, _num_layers(path), generator)
    layer |= {
        f"{name}.weight": _norm(size, generator) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    layer["eh_proj.weight"] = _weight((size, 2 * size), generator)
    if prefix == MELLUM_PREFIX:
        layer = {MELLUM_NAMES.get(name, f"layers.0.{name}"): layer[name] for name in layer}
    else:
        layer["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        layer["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors |= {prefix + name: tensor for name, tensor in layer.items()}
    _write(path, tensors, {})
    return path


def library_prefix(path: Path) -> str:
    """How the names of the layer begin that `add_library_layer` adds, or has added."""
    written = json.loads((path / "config.json").read_text())
    if written["model_type"] == "mellum":
        return MELLUM_PREFIX
    return f"model.layers.{written['num_hidden_layers']}."


def _num_layers(path: Path) -> int:
    return json.loads((path / "config.json").read_text())["num_hidden_layers"]


def _like_the_last_layer(
    tensors: dict[str, Tensor], num_layers: int, generator: torch.Generator
) -> dict[str, Tensor]:
    """Other numbers for each of its tensors; bfloat16 holds them."""
    prefix, layer = f"model.layers.{num_layers - 1}.", dict[str, Tensor]()
    for name, tensor in tensors.items():
        own = name.removeprefix(prefix)
        if name.startswith(prefix) and own.startswith(_COPIED):
            is_norm = tensor.dim() == 1 and "norm" in own
            make = _norm(tensor.numel(), generator) if is_norm else _weight(tensor.shape, generator)
            layer[own] = make.to(tensor.dtype)
    return layer


def _norm(size: int, generator: torch.Generator) -> Tensor:
    return (1 + 0.3 * torch.randn(size, generator=generator)).bfloat16().float()


def _weight(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    scale = shape[-1] ** -0.5 if len(shape) > 1 else 0.3
    return (scale * torch.randn(shape, generator=generator)).bfloat16().float()


def _write(path: Path, tensors: dict[str, Tensor], changes: dict[str, object]) -> None:
    written = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(written | changes | {FIELD: 1}))
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
