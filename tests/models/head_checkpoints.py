"""Tiny random checkpoints of draft heads, in the forms that others write."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from outdraft.kernels.ops import Kernels
from outdraft.kernels.torch.table import reference_kernels
from outdraft.models.decoder.causal_lm import CausalLM
from outdraft.models.decoder.loader import load_model
from tests.models.checkpoints import TINY, VARIANTS, randomised, save

HIDDEN, VOCAB = TINY["hidden_size"], TINY["vocab_size"]
INNER = 24


def tiny_target(
    folder: Path,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    kernels: Kernels | None = None,
) -> CausalLM:
    path = save(randomised(VARIANTS["llama"]()), folder / "target")
    return load_model(path, dtype, device, kernels or reference_kernels())


def random_hidden(num_rows: int, dtype: torch.dtype = torch.float64, seed: int = 5) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, HIDDEN, generator=generator).to(dtype)


def write(
    folder: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    file: str = "model.safetensors",
) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def medusa_tensors(
    num_heads: int = 3, num_layers: int = 1, *, bias: bool = True, known: int = VOCAB, seed: int = 0
) -> dict[str, Tensor]:
    """Tensors by the names that vLLM uses."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        for layer in range(num_layers):
            name = f"blocks.{head}.layers.{layer}"
            tensors[f"{name}.weight"] = normal(HIDDEN, HIDDEN, scale=HIDDEN**-0.5)
            if bias:
                tensors[f"{name}.bias"] = normal(HIDDEN, scale=0.3)
        tensors[f"lm_heads.{head}.weight"] = normal(known, HIDDEN, scale=HIDDEN**-0.5)
    return tensors


def medusa_config(num_heads: int = 3, num_layers: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "num_heads": num_heads,
        "num_hidden_layers": num_layers,
        "medusa_fc_bias": True,
    } | changes


def in_original_form(tensors: dict[str, Tensor], num_layers: int) -> dict[str, Tensor]:
    """With the names that the repository of the paper writes."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if parts[0] == "blocks":
            renamed[f"{parts[1]}.{parts[3]}.linear.{parts[4]}"] = tensor
        else:
            renamed[f"{parts[1]}.{num_layers}.weight"] = tensor
    return renamed


def mlp_tensors(num_heads: int = 3, *, tied: bool = False, seed: int = 0) -> dict[str, Tensor]:
    """All indexes, also where tied weights make them the same."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    tensors: dict[str, Tensor] = {}
    for head in range(num_heads):
        width = INNER if head else HIDDEN
        own = {
            f"emb.{head}.weight": normal(VOCAB, INNER),
            f"proj.{head}.weight": normal(INNER, width, scale=width**-0.5),
            f"ln.{head}.weight": normal(INNER, scale=0.3) + 1,
            f"ln.{head}.bias": normal(INNER, scale=0.3),
            f"head.{head}.weight": normal(VOCAB, INNER, scale=INNER**-0.5),
        }
        for name, tensor in own.items():
            part, _, kind = name.split(".")
            shared = f"speculator.{part}.{1 if part == 'proj' else 0}.{kind}"
            tensors[f"speculator.{name}"] = tensors.get(shared, tensor) if tied else tensor
    return {name: tensor.clone() for name, tensor in tensors.items()}


def mlp_config(num_heads: int = 3, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": HIDDEN,
        "inner_dim": INNER,
        "vocab_size": VOCAB,
        "n_predict": num_heads,
        "n_candidates": 5,
        "top_k_tokens_per_head": [1] * num_heads,
        "tie_weights": False,
        "scale_input": False,
    } | changes
